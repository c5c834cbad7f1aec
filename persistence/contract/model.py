"""The whole contract with random operations: a store is compared with a dictionary that follows the same rules."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from persistence.contract.base import Contract, fresh_flow
from persistence.errors import Conflict, Fenced, Terminal
from persistence.protocol import Manifest, Progress, StateStore, Stored, Write

_KEYS = [b"", b"a", b"b", b"\x00\xff"]
_keys = st.sampled_from(_KEYS)
_steps = st.integers(-2, 2)  # difference between a guess and the true value; hypothesis shrinks towards 0


class ModelContract(Contract):
    """Random histories of epochs, writes, retries and manifests."""

    def test_random_histories_agree_with_a_dictionary(self, store: StateStore) -> None:
        class Model(_Model):
            def __init__(self) -> None:
                super().__init__(store)

        run_state_machine_as_test(
            Model,
            settings=settings(
                max_examples=self.model_examples,
                stateful_step_count=30,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


class _Model(RuleBasedStateMachine):
    def __init__(self, store: StateStore) -> None:
        super().__init__()
        self.store = store
        self.flow = fresh_flow()
        self.stage = self.flow.stage("s")
        self.epoch = 0
        self.states: dict[bytes, Stored] = {}
        self.manifest: Manifest | None = None

    @rule(above=st.integers(0, 3))
    def acquire(self, above: int) -> None:
        epoch = self.store.acquire_epoch(self.flow, above=above)
        assert epoch > max(self.epoch, above)
        self.epoch = epoch

    @rule(step=_steps)
    def install(self, step: int) -> None:
        epoch = max(self.epoch + step, 1)
        if epoch < self.epoch:
            with pytest.raises(Fenced):
                self.store.install_epoch(self.flow, epoch)
        else:
            self.store.install_epoch(self.flow, epoch)
            self.epoch = epoch

    @rule(
        guesses=st.dictionaries(_keys, st.sampled_from([0, 0, 0, 0, -1, 1]), min_size=1),
        value=st.sampled_from([b"x", b"y", b""]),
        batch=st.integers(0, 2),
        step=st.sampled_from([0, 0, 0, 0, -1, 1]),
    )
    def save(self, guesses: dict[bytes, int], value: bytes, batch: int, step: int) -> None:
        """Each expected version is the true version, or off by one: -1 with the same content is a retry."""
        epoch = max(self.epoch + step, 1)
        writes = [Write(key, max(self._version(key) + guess, 0), value) for key, guess in guesses.items()]
        changed = tuple(w.key for w in writes if not (self._is_next(w) or self._is_retry(w, epoch, batch)))
        after = {w.key: Stored(w.expected + 1, epoch, batch, w.value) for w in writes if w.key not in changed}
        if epoch != self.epoch or changed:
            with pytest.raises((Conflict, Fenced, Terminal)) as caught:
                self.store.save(self.stage, writes, epoch=epoch, batch=batch)
            assert type(caught.value) is (
                Fenced if epoch < self.epoch else Terminal if epoch > self.epoch else Conflict
            )
            if epoch == self.epoch:
                assert isinstance(caught.value, Conflict)
                assert caught.value.keys == changed
                self._learn(after)
        else:
            self.store.save(self.stage, writes, epoch=epoch, batch=batch)
            self.states.update(after)

    @rule(step=_steps, batch=st.integers(0, 3), offset=st.integers(0, 9))
    def save_manifest(self, step: int, batch: int, offset: int) -> None:
        given = Manifest(epoch=max(self.epoch + step, 1), batch=batch, positions={"t": {0: Progress(offset)}})
        older = self.manifest is not None and (self.manifest.epoch, self.manifest.batch) > (given.epoch, given.batch)
        if given.epoch > self.epoch:
            with pytest.raises(Terminal):
                self.store.save_manifest(self.flow, given)
        elif given.epoch < self.epoch or older:
            with pytest.raises(Fenced):
                self.store.save_manifest(self.flow, given)
        else:
            self.store.save_manifest(self.flow, given)
            self.manifest = given

    @invariant()
    def everything_reads_the_same(self) -> None:
        assert self.store.load(self.stage, _KEYS) == self.states
        assert dict(self.store.scan(self.stage)) == self.states
        assert self.store.installed_epoch(self.flow) == self.epoch
        assert self.store.load_manifest(self.flow) == self.manifest

    def _version(self, key: bytes) -> int:
        return self.states[key].version if key in self.states else 0

    def _is_next(self, write: Write) -> bool:
        return write.expected == self._version(write.key)

    def _is_retry(self, write: Write, epoch: int, batch: int) -> bool:
        return self.states.get(write.key) == Stored(write.expected + 1, epoch, batch, write.value)

    def _learn(self, after: dict[bytes, Stored]) -> None:
        """After a conflict nothing was written; a store without `atomic_save` may have applied some writes."""
        if self.store.capabilities.atomic_save:
            return
        held = self.store.load(self.stage, list(after))
        for key, state in held.items():
            assert state in (self.states.get(key), after[key])
        self.states.update(held)
