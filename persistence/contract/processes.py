"""Contract 9, 19, 20 and 21 with threads, processes, forks and kills."""

import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest

from persistence.contract.base import Contract, creating
from persistence.errors import Conflict, Transient
from persistence.protocol import FlowRef, StageRef, StateStore, Stored, Write

Opener = Callable[[str], StateStore]

_spawn = multiprocessing.get_context("spawn")
_COUNTED = [b"a", b"b", b"c"]


class ProcessContract(Contract):
    """Writers that race, are killed, and fork."""

    def test_two_processes_that_increment_the_same_states_lose_nothing(
        self, store: StateStore, store_url: str, stage: StageRef, epoch: int
    ) -> None:  # 9
        self._skip_unless_shared(store)
        self._skip_unless_conditional(store)
        writers = [
            _spawn.Process(target=increment, args=(self.opener, store_url, stage, epoch, me, self.increments))
            for me in range(2)
        ]
        self._run(writers)
        self._check_counts(store, stage, 2)

    def test_threads_that_increment_the_same_states_lose_nothing(
        self, store: StateStore, store_url: str, stage: StageRef, epoch: int
    ) -> None:  # 9, 20: two threads on one handle, two on handles of their own
        self._skip_unless_conditional(store)

        def count(me: int) -> None:
            if me < 2:
                increment_with(store, stage, epoch, me, self.increments)
            else:
                increment(self.opener, store_url, stage, epoch, me, self.increments)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(count, range(4)))
        self._check_counts(store, stage, 4)

    def test_a_killed_writer_leaves_each_state_old_or_new(
        self, store: StateStore, store_url: str, stage: StageRef, epoch: int
    ) -> None:  # 9, 19
        self._skip_unless_shared(store)
        keys = [b"%03d" % i for i in range(200)]
        seed = random.randrange(2**32)
        print(f"seed {seed}")  # noqa: T201 - pytest shows it when the test fails
        chance = random.Random(seed)
        for _ in range(5):
            receiver, sender = _spawn.Pipe(duplex=False)
            writer = _spawn.Process(target=write_rounds, args=(self.opener, store_url, stage, epoch, keys, sender))
            writer.start()
            sender.close()
            acknowledged = 0
            for _ in range(chance.randrange(1, 12)):
                acknowledged = receiver.recv()
            os.kill(writer.pid or 0, signal.SIGKILL)
            writer.join()
            while receiver.poll():
                try:
                    acknowledged = receiver.recv()
                except EOFError:
                    break
            held = store.load(stage, keys)
            assert held.keys() == set(keys)
            for state in held.values():
                assert state.value == round_value(state.version)
                assert state.version in (acknowledged, acknowledged + 1)
            if store.capabilities.atomic_save:
                assert len({state.version for state in held.values()}) == 1

    def test_a_handle_works_on_both_sides_of_a_fork(
        self, store: StateStore, store_url: str, stage: StageRef, epoch: int
    ) -> None:  # 20
        self._skip_unless_shared(store)
        store.save(stage, creating([b"k"], b"0"), epoch=epoch, batch=0)
        child = multiprocessing.get_context("fork").Process(target=save_one, args=(store, stage, epoch, 1))
        self._run([child])
        save_one(store, stage, epoch, 2)
        assert store.load(stage, [b"k"]) == {b"k": Stored(3, epoch, 2, b"2")}

    def test_what_was_saved_is_there_after_reopening(
        self, store: StateStore, store_url: str, stage: StageRef, epoch: int
    ) -> None:  # 19
        store.save(stage, creating([b"k"], b"0"), epoch=epoch, batch=0)
        store.close()
        again = self.opener(store_url)
        assert again.load(stage, [b"k"]) == {b"k": Stored(1, epoch, 0, b"0")}
        assert again.installed_epoch(stage.flow_ref) == epoch
        again.close()

    def test_closing_again_does_nothing(self, store_url: str) -> None:  # 21
        store = self.opener(store_url)
        store.installed_epoch(FlowRef("contract"))
        store.close()
        store.close()
        never_used = self.opener(store_url)
        never_used.close()

    def _skip_unless_shared(self, store: StateStore) -> None:
        if not store.capabilities.shared:
            pytest.skip("other processes do not see this store")

    def _skip_unless_conditional(self, store: StateStore) -> None:
        if not store.capabilities.conditional:
            pytest.skip("the store documents that one of two simultaneous writes may be lost")

    def _run(self, processes: Sequence[BaseProcess]) -> None:
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * len(processes)

    def _check_counts(self, store: StateStore, stage: StageRef, writers: int) -> None:
        held = store.load(stage, _COUNTED)
        for key in _COUNTED:
            assert [int(count) for count in held[key].value.split(b",")[:writers]] == [self.increments] * writers
            assert held[key].version == self.increments * writers


def increment(opener: Opener, url: str, stage: StageRef, epoch: int, me: int, times: int) -> None:
    """Increment the states with a separate handle."""
    store = opener(url)
    increment_with(store, stage, epoch, me, times)
    store.close()


def increment_with(store: StateStore, stage: StageRef, epoch: int, me: int, times: int) -> None:
    """Add 1 to the counter of writer `me` in every state, `times` times, by loading and saving.

    The value contains a counter per writer: the next load must return acknowledged writes,
    and after a conflict or an unknown outcome the load shows which writes took effect.
    """
    known = dict.fromkeys(_COUNTED, 0)
    certain = True
    while True:
        held = store.load(stage, _COUNTED)
        writes = []
        for key in _COUNTED:
            version, value = (held[key].version, held[key].value) if key in held else (0, b"0,0,0,0")
            counts = [int(count) for count in value.split(b",")]
            assert counts[me] - known[key] in ((0,) if certain else (0, 1)), "an acknowledged write was lost"
            known[key] = counts[me]
            if counts[me] < times:
                counts[me] += 1
                writes.append(Write(key, version, b",".join(b"%d" % count for count in counts)))
        if not writes:
            return
        try:
            store.save(stage, writes, epoch=epoch, batch=me)
            known.update({write.key: known[write.key] + 1 for write in writes})
            certain = True
        except (Conflict, Transient):
            certain = False


def write_rounds(opener: Opener, url: str, stage: StageRef, epoch: int, keys: list[bytes], sender: Connection) -> None:
    """Write all keys repeatedly, and send the acknowledged version after each round."""
    store = opener(url)
    held = store.load(stage, keys)
    behind = min((state.version for state in held.values()), default=0)
    # Finish the round that a killed writer left incomplete.
    versions = {key: held[key].version if key in held else 0 for key in keys}
    late = [Write(key, behind, round_value(behind + 1)) for key in keys if versions[key] == behind]
    store.save(stage, late, epoch=epoch, batch=behind)
    version = behind + 1
    sender.send(version)
    while True:
        writes = [Write(key, version, round_value(version + 1)) for key in keys]
        store.save(stage, writes, epoch=epoch, batch=version)
        version += 1
        sender.send(version)


def round_value(version: int) -> bytes:
    """A value that reveals a torn write or another version."""
    return b"%d," % version * 100


def save_one(store: StateStore, stage: StageRef, epoch: int, version: int) -> None:
    """Replace the one state of the fork test."""
    store.save(stage, [Write(b"k", version, b"%d" % version)], epoch=epoch, batch=version)
