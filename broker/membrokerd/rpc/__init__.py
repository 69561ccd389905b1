"""gRPC, the contract: read the message, make the event, await the answer, convert. No decision is taken here."""
