"""Fixtures and helpers that the parts of the contract share."""

import uuid
from collections.abc import Iterator, Sequence
from typing import ClassVar

import pytest

from persistence.protocol import FlowRef, StageRef, StateStore, Stored, Write
from persistence.registry import open_store


class Contract:
    """Fixtures for every part of the contract."""

    opener: ClassVar["staticmethod[[str], StateStore]"] = staticmethod(open_store)
    increments: ClassVar[int] = 1000
    model_examples: ClassVar[int] = 60

    @pytest.fixture
    def store_url(self) -> str:
        """URL of the store under test. The store may contain other flows; the URL must not change within a test."""
        raise NotImplementedError("define the fixture store_url in the subclass")

    @pytest.fixture
    def store(self, store_url: str) -> Iterator[StateStore]:
        """One handle of the store."""
        store = self.opener(store_url)
        yield store
        store.close()

    @pytest.fixture
    def other(self, store_url: str) -> Iterator[StateStore]:
        """Another handle of the same store."""
        store = self.opener(store_url)
        yield store
        store.close()

    @pytest.fixture
    def flow(self) -> FlowRef:
        """A flow that was never used."""
        return fresh_flow()

    @pytest.fixture
    def stage(self, flow: FlowRef) -> StageRef:
        """A stage of `flow`."""
        return flow.stage("aircraft")

    @pytest.fixture
    def epoch(self, store: StateStore, flow: FlowRef) -> int:
        """The epoch of the run of `flow`."""
        return store.acquire_epoch(flow)


def fresh_flow() -> FlowRef:
    """A flow with a unique name."""
    return FlowRef(f"contract-{uuid.uuid4().hex}")


def creating(keys: Sequence[bytes], value: bytes = b"{}") -> list[Write]:
    """Writes that create states."""
    return [Write(key, 0, value) for key in keys]


def load_one(store: StateStore, stage: StageRef, key: bytes) -> Stored | None:
    """The state of one key."""
    return store.load(stage, [key]).get(key)
