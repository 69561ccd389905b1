"""Unmodified programs that share a GPU which is too small for them: `membroker run --guest` under random demand."""
