"""The command `membroker`. Each file is one part of it; nothing of the library imports them."""
