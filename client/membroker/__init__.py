"""membroker: borrow GPU memory from a broker."""
