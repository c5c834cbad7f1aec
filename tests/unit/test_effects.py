"""Every external effect goes through a fault point. The test reads the source, so it covers new code."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from persistence.commit.faults import known_points
from persistence.commit.steps import CommitStep

ROOT = Path(__file__).parents[2]
# Name of a call -> part of what it is called on: everything that changes something outside of the process.
EFFECTS = {
    "send": "producer",
    "send_many": "producer",
    "flush": "producer",
    "save": "store",
    "save_manifest": "store",
    "remove": "store",
    "acquire_epoch": "store|authority",
    "install_epoch": "store",
    "alter_group_offsets": "topics",
    "commit": "consumer|input",
}
GUARDS = {"effect", "commit"}  # `persistence.commit.order.commit` runs each step that it is given as an effect
# What runs a demo or a local stack, and what `headwater new` writes.
LEFT_OUT = ("jobs/demo", "jobs/new/template", "jobs/stack")


def modules(*tops: str) -> "list[Module]":
    paths = [path for top in tops for path in sorted((ROOT / top).rglob("*.py"))]
    return [module(path) for path in paths if not str(path.relative_to(ROOT)).startswith(LEFT_OUT)]


@cache
def module(path: Path) -> "Module":
    return Module(str(path.relative_to(ROOT)), ast.parse(path.read_text()))


@dataclass(frozen=True)
class Use:
    """A name in a function: what it is an attribute of, and whether a guard runs it."""

    function: str
    receiver: str
    name: str
    guarded: bool

    @property
    def is_effect(self) -> bool:
        return self.name in EFFECTS and any(part in self.receiver.lower() for part in EFFECTS[self.name].split("|"))


class Module(ast.NodeVisitor):
    """What the functions of a module use."""

    def __init__(self, name: str, tree: ast.Module) -> None:
        self.name = name
        self.uses: list[Use] = []
        self.methods: set[str] = set()
        self.points: list[str] = []
        self._function = ""
        self._guarded = False
        self.visit(tree)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.methods |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before, self._function = self._function, node.name
        self.generic_visit(node)
        self._function = before

    def visit_Call(self, node: ast.Call) -> None:
        self.visit(node.func)
        before = self._guarded
        if isinstance(node.func, ast.Name) and node.func.id in GUARDS:
            self._guarded = True
            self.points += [ast.unparse(node.args[0])] if node.func.id == "effect" else []
        if isinstance(node.func, ast.Attribute) and node.func.attr == "save_everywhere":
            self.points += map(ast.unparse, node.args[1:])
        for part in [*node.args, *node.keywords]:
            self.visit(part)
        self._guarded = before

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.uses.append(Use(self._function, ast.unparse(node.value), node.attr, self._guarded))
        self.visit(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        self.uses.append(Use(self._function, "", node.id, self._guarded))

    def users(self, of: "Module", function: str) -> list[Use]:
        """Where this module uses a function of that one: methods as attributes, private ones in their own module."""
        if function.startswith("_") and self is not of:
            return []
        method = function in of.methods
        found = [use for use in self.uses if use.name == function and bool(use.receiver) is method]
        return [use for use in found if use.guarded or not use.is_effect]  # an effect without a guard is judged itself


def uncovered(every: list[Module]) -> list[str]:
    """Functions with an effect that can be reached without a fault point on the way."""

    def is_covered(module: Module, function: str, above: frozenset[str] = frozenset()) -> bool:
        users = [(other, use) for other in every for use in other.users(module, function)]
        return bool(users) and all(
            use.guarded or (use.function not in above and is_covered(other, use.function, above | {function}))
            for other, use in users
        )

    bare = {(module, use.function) for module in every for use in module.uses if use.is_effect and not use.guarded}
    return sorted(f"{module.name}: {function}" for module, function in bare if not is_covered(module, function))


def test_every_effect_of_engine_republisher_redrive_and_runner_goes_through_a_fault_point() -> None:
    assert uncovered(modules("aggregations", "jobs")) == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def work(producer): producer.flush()", ["new: work"]),
        ("def work(producer): effect(PUBLISH, lambda: producer.flush())", []),
        ("def work(store): effect(EPOCH, lambda: _save(store))\ndef _save(store): store.save()", []),
        ("def work(store): _save(store)\ndef _save(store): store.save()", ["new: _save"]),
    ],
)
def test_an_effect_without_a_point_is_found(code: str, found: list[str]) -> None:
    assert uncovered([Module("new", ast.parse(code))]) == found


def test_every_point_in_the_code_is_in_the_registry_and_the_other_way_round() -> None:
    used = {point for module in modules("aggregations", "jobs", "persistence") for point in module.points}
    used.discard("point")  # handed on by a caller, who names it
    named = {
        f"CommitStep.{CommitStep(kind).name}" if kind in set(CommitStep) else kind.upper()
        for kind in map(kind_of, known_points())
    }
    kinds = {point.partition("(")[0].removesuffix(".of") for point in used}
    functions = {"write_of": "WRITE", "removal_of": "REMOVE", "close_of": "CLOSE"}
    assert {functions.get(one, one) for one in kinds} == named


@pytest.mark.parametrize("store", ["cassandra", "redis", "sqlite"])
def test_every_store_writes_states_through_the_point_of_their_stage(store: str) -> None:
    assert any(use.name == "write_of" for module in modules(f"persistence/{store}") for use in module.uses)


def kind_of(point: str) -> str:
    kind, _, name = point.partition(":")
    return kind if name.isupper() or not name else f"{kind}_{name}"
