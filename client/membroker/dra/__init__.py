"""The agent of Kubernetes' Dynamic Resource Allocation: a tenant for each ResourceClaim that a pod of this node has.

`membroker dra` runs on each node beside the daemons. The kubelet asks it to prepare a claim before a pod starts, and to
unprepare it when no pod of the node needs it any more.
"""
