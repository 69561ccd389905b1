"""A broker that recalls memory, and a model that it can ask for some."""

from __future__ import annotations

import pytest
from tests.support.fake_broker import MODEL, PlayedBroker, line, model

import membroker


@pytest.fixture
def broker(broker: PlayedBroker) -> PlayedBroker:
    """A broker that recalls memory."""
    broker.revision = 2
    return broker


@pytest.fixture
def served(client: membroker.Client) -> membroker.Model:
    """A model that the client has registered."""
    line(client).inventory.registered(MODEL)
    return model(client)
