"""The pure core: the books and the rules of lending, as a deterministic machine.

`Broker.step(event, now)` takes one event and returns effects and facts. No clock, socket, thread, logger, proto or
driver belongs here: time is an argument, I/O goes out as effects, outcomes come back as events. So the same events
always give the same books, and the simulation runs the code that lends real memory.
"""
