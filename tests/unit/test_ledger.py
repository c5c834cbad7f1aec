"""The ledger of dead letters that left no hole: what is listed, what is struck, and what proves a first delivery."""

import pickle

from aggregations.per_message import ledger as ledgers
from aggregations.per_message.ledger import LISTED, ROUTES, Changes, Entry, Ledger, Reading, UnlistedError, merged
from envelope import Hop, Lineage, Node, Route, Standing, TopicPartition
from envelope.dedup.lineage import Redriven
from envelope.redrive import Redrive
from persistence.manifest import Manifest, Rebuilt

GROUP = "raw:0#R>rep>legs"


def entry(n: int, stage: str = "a", group: str = GROUP) -> Entry:
    return Entry(stage, group, (n, 0))


OWN = Node("legs", 0, 99, topic_id="T")


def listing(*entries: Entry) -> Ledger:
    return Ledger("fleet").changed(Changes(added=set(entries)))


def listed(ledger: Ledger) -> set[Entry]:
    return {
        Entry(stage, group, at)
        for stage, groups in ledger.listed.items()
        for group, positions in groups.items()
        for at in positions
    }


def test_the_changes_of_several_tasks_are_those_of_all_of_them() -> None:
    batch = Changes({entry(1)}, {entry(2)}, {entry(3)}, {"r": (5, 0), "s": (1,)})
    batch.add(Changes({entry(4)}, {entry(5)}, {entry(6)}, {"r": (4, 0), "s": (2,), "t": (0,)}))
    assert batch == Changes(
        {entry(1), entry(4)}, {entry(2), entry(5)}, {entry(3), entry(6)}, {"r": (5, 0), "s": (2,), "t": (0,)}
    )


def test_with_the_manifest_of_a_batch_goes_what_it_filled_and_read_but_not_what_died_again() -> None:
    changes = Changes({entry(1)}, {entry(2), entry(3)}, {entry(3)}, {"r": (5, 0)})
    assert changes.resolved() == Changes(filled={entry(2)}, seen={"r": (5, 0)})


def test_what_is_filled_is_struck_and_everything_else_stays_listed() -> None:
    ledger = listing(entry(1), entry(2), entry(1, "b"), entry(1, group="other"))
    after = ledger.changed(Changes(filled={entry(1), entry(9), entry(1, "c"), entry(1, group="unknown")}))
    assert listed(after) == {entry(2), entry(1, "b"), entry(1, group="other")}
    assert listing(entry(1)).changed(Changes(filled={entry(1)})).listed == {}


def test_the_entries_of_an_element_are_those_of_itself_its_record_and_its_items_each_once() -> None:
    at = Standing(f"{GROUP}:0", GROUP, (7, 0, 2))
    record, item, inner = (Entry("a", GROUP, position) for position in ((7, 0), (7, 0, 2), (7, 0, 2, 5)))
    ledger = listing(record, item, inner, Entry("a", GROUP, (7,)), Entry("a", GROUP, (7, 0, 3)))
    assert ledger.entries("a", OWN, at, None, (2,)) == (item, record)
    assert ledger.entries("a", OWN, at, None) == (item,)
    assert ledger.entries("a", OWN, at, None, whole=True) == (item, inner)


def test_an_entry_that_is_filled_and_added_in_one_batch_is_listed() -> None:
    """It is filled by a copy in the batch, which a later stage rejects again."""
    assert listed(listing(entry(1)).changed(Changes({entry(1)}, {entry(1)}))) == {entry(1)}


def test_the_dead_letters_beyond_the_limit_are_counted_by_stage_and_one_that_is_listed_again_takes_no_room() -> None:
    full = listing(*(entry(n) for n in range(LISTED - 1)))
    one_more = full.changed(Changes({entry(0), entry(LISTED)}))
    assert (len(listed(one_more)), one_more.forgotten) == (LISTED, {})
    over = one_more.changed(Changes({entry(0), entry(LISTED + 1), entry(LISTED + 2), entry(1, "b")}))
    assert (listed(over), over.forgotten) == (listed(one_more), {"a": 2, "b": 1})
    assert over.changed(Changes({entry(LISTED + 3)})).forgotten == {"a": 3, "b": 1}
    room = over.changed(Changes({entry(LISTED + 3)}, {entry(0)}))
    assert entry(LISTED + 3) in listed(room)
    assert room.forgotten == over.forgotten


def test_a_ledger_lists_as_many_as_it_may_however_many_batches_they_come_in() -> None:
    full = listing(*(entry(n) for n in range(LISTED - 2)))
    over = full.changed(Changes({entry(LISTED + n) for n in range(4)}))
    assert (len(listed(over)), over.forgotten) == (LISTED, {"a": 2})
    assert entry(LISTED) in listed(over), "the lowest positions first, whichever task found them"


def test_positions_with_and_without_event_ids_are_listed_side_by_side() -> None:
    """Of one group some messages have an index where others have the event's id."""
    mixed = [Entry("a", GROUP, at) for at in ((7, -1, "e"), (7, -1, 0), (7, "x"), (7, 0))]
    ledger = listing(*mixed)
    assert Ledger.of("fleet", 1, Manifest(1, 1, **ledger.fields())).listed == ledger.listed


def test_a_batch_waits_for_what_is_not_listed_yet_and_not_for_what_there_is_no_room_for() -> None:
    ledger = listing(entry(1))
    new = {entry(2), entry(1, "b"), entry(1, group="other")}
    assert ledger.missing_from({entry(1), *new}) == new
    full = Ledger("fleet", forgotten={"a": 1})
    assert full.missing_from({entry(1), entry(1, "b")}) == {entry(1, "b")}


def test_a_flow_of_more_routes_than_are_kept_proves_no_first_delivery_from_then_on() -> None:
    most = Ledger("fleet").changed(Changes(seen={f"r{n}": (n,) for n in range(ROUTES)}))
    assert most.seen is not None
    assert len(most.seen) == ROUTES
    over = most.changed(Changes(seen={"one more": (0,)}))
    assert over.seen is None
    assert over.changed(Changes(seen={"r": (1,)})).seen is None


def test_the_ledger_comes_back_from_the_manifest_as_it_was_written() -> None:
    ledger = Ledger("fleet", 3).changed(Changes({entry(2), entry(1), entry(1, "b")}, seen={"r": (5, 0)}))
    ledger = Ledger("fleet", 3, ledger.listed, {"a": 4}, ledger.seen)
    assert Ledger.of("fleet", 3, Manifest(1, 1, **ledger.fields())) == ledger
    assert ledger.fields()["dead"]["a"] == {GROUP: ((1, 0), (2, 0))}
    assert Ledger.of("fleet", 3, None) == Ledger("fleet", 3)
    assert Ledger.of("fleet", 1, Manifest(1, 1)).seen is None, "nobody kept it from the start"


def test_what_any_store_lists_is_listed_and_what_one_of_them_does_not_know_proves_nothing() -> None:
    one = Ledger("fleet", 2, {"a": {GROUP: frozenset({(1, 0)})}}, {"a": 3, "b": 1, "d": 0}, {"r": (5,), "s": (1,)})
    other = Ledger("fleet", 2, {"b": {GROUP: frozenset({(2, 0)})}}, {"a": 2, "c": 4}, {"r": (4,), "s": (2,)})
    both = merged([one, other])
    assert (both.flow, both.generation) == ("fleet", 2)
    assert listed(both) == {entry(1), entry(2, "b")}
    assert (both.forgotten, both.seen) == ({"a": 3, "b": 1, "c": 4, "d": 0}, {"r": (5,), "s": (2,)})
    for unknown in ([one, Ledger("fleet", 2, seen=None)], [Ledger("fleet", 2, seen=None), one]):
        assert merged(unknown).seen is None


def standing(*position: int, route: Route = Route.COPY) -> Standing:
    return Standing(GROUP, GROUP, position, route)


def back(**fields: object) -> Redriven:
    return Redriven(Redrive(hole=False, application="fleet", **fields), "!legs:0#T", 3)  # type: ignore[arg-type]


DIED = Entry("a", "!legs:0#T", (3,))


def test_a_record_that_is_read_again_has_the_entry_that_its_own_coordinates_have() -> None:
    own = Node("legs", 0, 3, topic_id="T")
    assert listing(DIED).entries("a", own, standing(1, 0), None) == (DIED,)
    assert listing(DIED).entries("a", OWN, standing(1, 0), None) == ()


def test_how_a_redriven_record_comes_to_a_stage_is_what_the_ledger_proves_of_it() -> None:
    """Missing: folded however far the history is. Letter: unproven below the floor. Copy: not folded."""
    at = standing(1, 0)

    def route(ledger: Ledger, how: Redriven) -> Route:
        return ledger.route("a", at, how, ledger.entries("a", OWN, at, how))

    of_another = Redriven(Redrive(hole=False, application="other", asserted=True), "!legs:0#T", 3)
    assert route(listing(entry(1)), back()) is Route.MISSING
    assert route(listing(entry(1)), of_another) is Route.MISSING, "the event is listed, whoever redrives it"
    assert route(listing(DIED), back()) is Route.DEAD_LETTER
    assert route(listing(DIED), back(asserted=True)) is Route.ASSERTED
    assert route(listing(DIED), of_another) is Route.DEAD_LETTER, (
        "another flow's operator asserts nothing about this one"
    )
    assert route(listing(), back()) is Route.COPY
    assert route(listing(entry(1, "b")), back()) is Route.COPY
    full = Ledger("fleet", forgotten={"a": 1})
    assert route(full, back()) is Route.DEAD_LETTER
    assert route(full, back(asserted=True)) is Route.HEALED
    assert route(full, of_another) is Route.COPY
    assert route(Ledger("fleet", forgotten={"b": 1}), back()) is Route.COPY
    with_hole = Redriven(Redrive(hole=True, application="fleet"), "!legs:0#T", 3)
    assert route(full, with_hole) is Route.COPY, "its hole is in a state, or it is folded already"


def test_a_plain_record_is_missing_if_its_event_is_listed_and_comes_as_it_came_if_not() -> None:
    ledger = listing(entry(1))
    for one, expected in ((1, Route.MISSING), (2, Route.RETRIED)):
        at = standing(one, 0, route=Route.RETRIED)
        assert ledger.route("a", at, None, ledger.entries("a", OWN, at, None)) is expected


def test_an_item_is_listed_by_itself_or_with_the_record_that_it_was_made_of() -> None:
    ledger = listing(entry(1), Entry("a", GROUP, (2, 0, 4)), Entry("a", "!legs:0#T", (3, 4)))
    found = {n: ledger.entries("a", OWN, standing(n, 0, 4), None, (4,)) for n in (1, 2)}
    assert found == {1: (entry(1),), 2: (Entry("a", GROUP, (2, 0, 4)),)}
    assert ledger.entries("a", OWN, standing(2, 0, 5), None, (5,)) == ()
    assert ledger.entries("a", OWN, standing(9, 0, 4), back(), (4,)) == (Entry("a", "!legs:0#T", (3, 4)),)
    assert ledger.entries("a", OWN, standing(9, 0, 5), back(), (5,)) == ()


def test_a_record_that_steps_have_yet_to_take_apart_has_the_entries_of_its_items_where_they_are_asked_for() -> None:
    items = (Entry("a", GROUP, (2, 0, 4)), Entry("a", GROUP, (2, 0, 1, 3)))
    ledger = listing(*items, Entry("a", GROUP, (2, 1, 4)), Entry("a", "!legs:0#T", (3, 7)))
    assert ledger.entries("a", OWN, standing(2, 0), None) == ()
    assert set(ledger.entries("a", OWN, standing(2, 0), None, whole=True)) == set(items)
    assert ledger.entries("a", OWN, standing(9, 0), back(), whole=True) == (Entry("a", "!legs:0#T", (3, 7)),)


def test_the_error_that_asks_for_a_listing_says_what_to_list_also_when_a_worker_sends_it() -> None:
    error = pickle.loads(pickle.dumps(UnlistedError(frozenset({entry(1)}), True)))
    assert (error.entries, error.beside) == ({entry(1)}, True)


def test_only_the_generation_of_the_flow_that_gave_a_record_up_has_its_entry() -> None:
    ledger = Ledger("fleet", 2)
    assert ledger.mine(Redrive(application="fleet", generation=2))
    assert not ledger.mine(Redrive(application="fleet", generation=1))
    assert not ledger.mine(Redrive(application="other", generation=2))


def lineage(root: int, own: int = 0, *, partition: int = 0, index: int | None = 0, raw: int = 0) -> Lineage:
    hop = Hop("raw", raw, root, via="rep", index=index, topic_id="R")
    return Lineage.of([hop], Node("legs", partition, own, "T"))


def test_a_first_delivery_is_above_all_that_came_the_same_way_before_and_in_this_batch() -> None:
    reading = Reading({})
    assert [reading.again(lineage(root), b"k") for root in (5, 6, 6, 5, 7)] == [False, False, True, True, False]
    assert reading.read == {"raw:0#R>rep>legs:0": (7, 0)}
    later = Reading(reading.read)
    assert [later.again(lineage(root), b"k") for root in (7, 8)] == [True, False]
    assert not later.again(lineage(1, raw=1), b"k"), "another partition of the root has positions of its own"


def test_a_partition_that_a_known_path_did_not_take_before_proves_nothing() -> None:
    """The topic was given partitions: a copy of what came by an old one may come by a new one."""
    reading = Reading({"raw:0#R>rep>legs:0": (5, 0)})
    assert reading.again(lineage(9, partition=1), b"k")
    assert not Reading({}).again(lineage(9, partition=1), b"k")


def test_when_a_path_has_more_partitions_a_copy_may_come_by_any_of_them() -> None:
    """From 2 to 3 partitions a key may move from an old one to the other old one."""
    ledger = Ledger("fleet", seen={f"{GROUP}:0": (9, 0), f"{GROUP}:1": (5, 0), "raw:1#R>rep>legs:1": (2, 0)})
    assert not Reading(ledger.seen).again(lineage(7, partition=1), b"k")
    assert ledger.changed(Changes(seen={f"{GROUP}:1": (6, 0)})).seen == {**(ledger.seen or {}), f"{GROUP}:1": (6, 0)}
    wider = ledger.changed(Changes(seen={f"{GROUP}:2": (8, 0)}))
    assert wider.seen == {**{f"{GROUP}:{one}": (9, 0) for one in range(3)}, "raw:1#R>rep>legs:1": (2, 0)}
    assert [Reading(wider.seen).again(lineage(root, partition=1), b"k") for root in (7, 9, 10)] == [True, True, False]
    assert Ledger("fleet", seen=None).levelled().seen is None


def test_without_a_key_an_index_or_a_list_of_routes_a_record_may_always_be_a_copy() -> None:
    assert Reading({}).again(lineage(1), None)
    assert Reading({}).again(lineage(1, index=None), b"k")
    assert Reading(None).again(lineage(1), b"k")
    retry = Hop("retry", 0, 0, pass_through=True)
    assert Reading({}).again(Lineage.of([retry], Node("legs", 0, 0)), b"k")


def test_what_is_no_first_delivery_by_itself_is_above_nothing_that_comes_behind_it() -> None:
    """A record without a key counts as read: the same event with a key is its copy."""
    reading = Reading({})
    assert reading.again(lineage(4), None)
    assert reading.again(lineage(4), b"k")


def test_below_the_ends_of_a_run_that_crashed_nothing_is_a_proven_first_delivery() -> None:
    doubt = {TopicPartition("legs", 0): 10}
    assert [Reading({}, doubt).again(lineage(own, own), b"k") for own in (9, 10)] == [True, False]
    own = [Lineage.of([], Node("legs", partition, offset)) for partition, offset in ((0, 9), (0, 10), (1, 9))]
    assert [Reading({}, doubt).again(one, b"k") for one in own] == [True, False, False]
    assert not Reading(None).again(own[0], b"k"), "a record that nobody republished comes once"


def test_beyond_the_limit_the_lowest_positions_are_listed_whatever_is_listed_already(monkeypatch) -> None:
    """Whether a record is listed depends on the batch alone: a replay must find the same."""
    monkeypatch.setattr(ledgers, "LISTED", 12)
    full = listing(*(entry(n) for n in range(10))).changed(Changes({entry(n) for n in range(100)}))
    assert listed(full) == {entry(n) for n in range(12)}
    assert full.forgotten == {"a": 88}


def test_dead_letters_of_a_generation_whose_states_were_continued_are_mine() -> None:
    ledger = Ledger.of("fleet", 3, Manifest(1, 1), Rebuilt(2, 7, "ann@host", "", (2, 1)))
    letters = [Redrive("", False, "fleet", False, generation) for generation in (1, 2, 3, 4)]
    assert [ledger.mine(one) for one in letters] == [True, True, True, False]
    assert ledger.changed(Changes()).earlier == ledger.levelled().earlier == (2, 1)
    assert not ledger.mine(Redrive("", False, "other", False, 1))
