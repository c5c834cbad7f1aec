"""`headwater submit-command`: the spark-submit command for a flow."""

import shlex
from typing import Annotated, Any

import typer

from jobs import documentation
from jobs.cli.options import FlowName, Json
from jobs.cli.run import SPARK
from jobs.environment import UsageError
from jobs.screen import emit, say, write

_SUBMITTED = ("master", "conf")  # options of `run` that become spark-submit's own


def submit_command(
    context: typer.Context,
    flow: FlowName,
    deploy_mode: Annotated[
        str, typer.Option(metavar="client|cluster", help="Where the driver runs: here, or on a machine of the cluster.")
    ] = "client",
    py_files: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="Module, or zip of modules, that the workers need besides the flow's own file; may be repeated.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Print the spark-submit command that runs a flow. It takes all options of `headwater run`, after FLOW.

    --master and --conf become options of spark-submit, whose settings win. Arguments after `--` are for `run` alone.
    Nothing is submitted. The exit code is 2 if the flow could not run there.
    """
    from aggregations.spark.checks import check_given
    from aggregations.spark.jvm import DEFAULT_MASTER
    from jobs import settings
    from jobs.loading import files_of, load_flow
    from jobs.submit.command import submit_line

    if deploy_mode not in ("client", "cluster"):
        raise UsageError(f"--deploy-mode {deploy_mode}: write client or cluster")
    found = load_flow(flow)
    given, arguments = _options_of_run(context, flow)
    if given["runner"] != SPARK:
        raise UsageError(f"--runner {given['runner']}: spark-submit runs flows on Spark; use `headwater run`")
    master = given["master"] or DEFAULT_MASTER
    if deploy_mode == "cluster" and master.startswith(("local", "spark://")):
        raise UsageError(
            f"--deploy-mode cluster: Spark does not run Python drivers on the machines of {master}; remove the option, or "
            "give another --master (yarn, k8s://...)"
        )
    settings.seconds(given["trigger"], "--trigger")
    settings.seconds(given["metadata_max_age"], "--metadata-max-age")
    conf = settings.pairs(given["conf"] or (), "--conf")
    named = {name: given[name] for name in ("dead_letters", "journal", "journal_share")}
    chosen = settings.of_flow(found, given["store"], **named)
    check_given(found, chosen.options(accept=given["accept"] or ()), master, conf=conf)
    line = submit_line(
        f"headwater {found.name}",
        ["run", flow, *arguments],
        master=master,
        deploy_mode=deploy_mode,
        py_files=[*(str(path) for path in files_of(flow)), *(py_files or ())],
        conf=conf,
    )
    if json:
        emit({"command": line})
        return
    write(shlex.join(line))
    if not master.startswith("local"):
        guide = documentation.directory() / "guides" / "cluster.md"
        say(f"every worker needs headwater and its packages: see {guide}")
    if deploy_mode == "cluster":
        say(
            "HEADWATER_* variables and headwater.toml are not available to the driver there: use options or a settings file"
        )


def _options_of_run(context: typer.Context, flow: str) -> tuple[dict[str, Any], list[str]]:
    """The options of `run` in the rest of the command line: values by name, and the options to pass on."""
    from typer.main import get_command

    from jobs.cli import app

    group: Any = get_command(app)
    command = group.commands["run"]
    parsed = command.make_context(context.command_path, [flow, *context.args])
    texts = []
    for parameter in command.params:
        name = parameter.name or ""
        given = parsed.get_parameter_source(name)
        if parameter.param_type_name == "option" and name not in _SUBMITTED and given and given.name == "COMMANDLINE":
            texts += _texts(parameter, parsed.params[name])
    return parsed.params, texts


def _texts(option: Any, value: Any) -> list[str]:
    """An option as text of the command line."""
    name = option.opts[0]
    if value is True:
        return [name]
    return [text for one in (value if isinstance(value, list | tuple) else [value]) for text in (name, str(one))]
