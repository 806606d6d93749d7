"""The command line."""

import functools
import json
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.table import Table

import fedsap
from fedsap import show
from fedsap.config import Config, assignments, merged, read, resolve
from fedsap.errors import UserError
from fedsap.files import plainly

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Federated prototype learning: a whole federation as one stack of tensors.",
)

ConfigFile = Annotated[Path | None, typer.Argument(metavar="[CONFIG.toml]", help="A configuration file.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a key, such as train.rounds=50.")
]
Methods = Annotated[list[str] | None, typer.Option("--method", help="A method; may be repeated, or 'all'.")]
Seeds = Annotated[list[int] | None, typer.Option("--seed", min=0, help="A seed; may be repeated.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder for the results.")]
DataRoot = Annotated[
    Path | None, typer.Option("--data", help="Folder of the data; then $FEDSAP_DATA, then the user's cache.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output and nothing else.")]

P = ParamSpec("P")
_NotUnderstood: Any = typer.BadParameter.__base__  # click's UsageError, of which some versions of typer carry a copy


def _mending(command: Callable[P, None]) -> Callable[P, None]:
    """Says a user's mistake in one line and exits with 2."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except UserError as error:
            typer.echo(f"fedsap: {error}", err=True)
            raise typer.Exit(2) from None

    return wrapped


def _configs(
    file: Path | None, pairs: list[str] | None, methods: list[str] | None, seeds: list[int] | None, data: Path | None
) -> list[Config]:
    return resolve(_layer(file, pairs, data), methods or (), seeds or ())


def _layer(file: Path | None, pairs: list[str] | None, data: Path | None) -> dict[str, Any]:
    """What the user says, from all places."""
    layer = merged(read(file) if file else {}, assignments(pairs or []))
    return layer if data is None else merged(layer, {"data": {"root": str(data)}})


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    """Whole numbers with commas between them."""
    try:
        found = tuple(int(word) for word in text.split(",")) if text else ()
    except ValueError:
        found = (-1,)
    if any(n < 0 for n in found) or len(set(found)) < len(found):
        raise UserError(f"{option}: got '{text}', takes different whole numbers such as 1234,1235")
    return found


@contextmanager
def _interrupts(console: Console) -> Iterator[Callable[[], bool]]:
    """Ctrl-C once: stop after this round. Twice: at once."""
    asked = False

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            signal.default_int_handler(number, frame)
        asked = True
        console.print("stopping after this round; Ctrl-C again stops at once", highlight=False)

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _following(track: list[str], console: Console, group: Sequence[Any] = ()) -> Iterator[Callable[[Any, Any], None]]:
    """Shows rows as they come, of the runs of `group`, which go together, or of one run after another; and hands them
    to trackers."""
    from fedsap.track import Tracked

    with ExitStack() as open_:
        trackers: dict[Any, Any] = {}
        shown: dict[Any, show.Progressing] = {}

        def follow(some: Sequence[Any], done: int) -> None:
            open_.close()  # one live display at a time
            name, seeds = some[0].config.method["name"], ", ".join(str(one.config.seed) for one in some)
            title = f"{name} seed{'s' if len(some) > 1 else ''} {seeds}"
            progress = open_.enter_context(
                show.Progressing(title, some[0].config.rounds, done, console, runs=len(some))
            )
            for one in some:
                trackers[one] = open_.enter_context(Tracked(track, one.folder, one.config, one.rows()))
                shown[one] = progress

        def hear(one: Any, row: Any) -> None:
            if one not in shown:
                follow([one], row["round"] - 1)
            shown[one](row)
            trackers[one](row)

        if group:
            follow(group, min(len(one.rows()) for one in group))
        yield hear


def _aside(configs: Sequence[Config]) -> Iterator[str]:
    """What is to be said of methods and unlabelled samples before a run."""
    from fedsap.methods import METHODS

    mine = dict.fromkeys(c.method["name"] for c in configs)
    idle = [name for name in mine if not METHODS[name].uses_pool]
    if configs[0].unlabelled.size and idle:
        yield f"without a use for unlabelled samples, trained on the labelled ones: {', '.join(idle)}"
    needy = [name for name, m in METHODS.items() if m.needs_pool]
    if set(mine) == METHODS.keys() - needy:  # what `all` has come to
        yield f"left out, because they need unlabelled samples (unlabelled.size): {', '.join(needy)}"


@app.command()
@_mending
def run(
    config: ConfigFile = None,
    sets: Set = None,
    method: Methods = None,
    seed: Seeds = None,
    out: Out = None,
    data: DataRoot = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the runs in --out.")] = False,
    origin: Annotated[
        Path | None,
        typer.Option("--from", help="Begin the rounds with unlabelled samples from the finished runs here."),
    ] = None,
    track: Annotated[list[str] | None, typer.Option("--track", help="Also log to tensorboard or mlflow.")] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", help="simulate, in this process; or flower. Short for --set engine=...")
    ] = None,
    superlink: Annotated[
        str | None,
        typer.Option("--superlink", metavar="HOST:PORT", help="Flower's SuperLink; without it, a simulation."),
    ] = None,
    ca: Annotated[
        Path | None, typer.Option("--ca", help="The certificate that the SuperLink is known by; without it, no TLS.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train one or more methods, print their table and write a page of the results.

    With nothing given: FedSAP on scikit-learn's digits.
    """
    from fedsap.collect import collect
    from fedsap.continued import take_over
    from fedsap.federation import build_federation, dataset
    from fedsap.report import write_report
    from fedsap.runs import Run, Stopped, execute_all, together
    from fedsap.track import check

    check(track or [])
    console = show.to_people()
    sets = [*(sets or []), *([f"engine={engine}"] if engine else [])]
    layer = _layer(config, sets, data)
    configs = resolve(layer, method or (), seed or ())
    on_flower = configs[0].engine == "flower"
    if (superlink or ca) and not on_flower:
        raise UserError("--superlink: is for the engine flower; takes --engine flower with it")
    folder = out or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; --out takes a folder")
    runs = [Run(folder / f"{c.method['name']}-{c.seed}", c) for c in configs]
    for one in runs:
        one.check(resume)
    for line in _aside(configs):
        console.print(line, highlight=False, soft_wrap=True)
    try:
        with _interrupts(console) as stop:
            if on_flower:
                from fedsap.engines.flower.launch import SuperLink, play

                if origin is not None:
                    raise UserError("--from: that run's clients are not on Flower's nodes; takes engine simulate")
                where = SuperLink(superlink, ca) if superlink else None
                with _following(track or [], console) as hear:
                    play(runs, layer, folder, superlink=where, resume=resume, hear=hear, stop=stop)
            else:
                loaded = dataset(configs[0])
                _say_shortage(loaded)
                for one in runs:
                    if origin is not None:
                        take_over(one, [origin], loaded)
                for group in together(runs):
                    with _following(track or [], console, group) as hear:
                        execute_all(group, lambda c: build_federation(c, loaded), on_round=hear, stop=stop)
    except Stopped as stopped:
        console.print(f"{stopped}; --out {folder} --resume goes on", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    entries = collect([one.folder for one in runs])
    if as_json:
        typer.echo(json.dumps({"methods": entries, "out": str(folder)}))
    else:
        Console().print(show.results(entries))  # before the report: the results are there, whatever becomes of it
        for line in filter(None, map(show.privacy, entries)):
            typer.echo(line)
    for path in write_report([folder], folder, ("html",), _complain):
        if not as_json:
            typer.echo(f"report: {path}")


@app.command()
@_mending
def reproduce(
    what: Annotated[list[str], typer.Argument(metavar="table1|table2|...|figures|study|all", help="What to make.")],
    only: Annotated[str | None, typer.Option("--only", help="Part of it, such as cifar10,n=3,fedsap.")] = None,
    seeds: Annotated[str | None, typer.Option("--seeds", help="Other seeds, such as 1234,1235.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small network, few rounds and samples: tries the way, not the paper.")
    ] = False,
    sets: Set = None,
    data: DataRoot = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for runs and tables.")] = Path("runs/reproduce"),
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0, help="Stop after so long; the same command goes on.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make the paper's tables and figures: run what is missing, then print the paper's value, ours, the difference."""
    from fedsap.experiments.command import command, deadline
    from fedsap.experiments.plan import Change

    console = show.to_people()
    change = Change(quick, _numbers("--seeds", seeds), tuple(sets or ()), data)
    until = deadline(minutes)
    with _interrupts(console) as stop:
        status = command(
            what, only, change, out, until=until, as_json=as_json, console=console, stop=stop, complain=_complain
        )
    if status:
        raise typer.Exit(status)


@app.command()
@_mending
def partition(
    config: ConfigFile = None,
    sets: Set = None,
    seed: Seeds = None,
    data: DataRoot = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="Write a picture of it to this .png or .pdf.")
    ] = None,
    save: Annotated[Path | None, typer.Option("--save", help="Write it to this JSON file.")] = None,
    as_json: Json = False,
) -> None:
    """Show who would hold which classes, and how many samples of each."""
    from fedsap.data import picture as drawing
    from fedsap.federation import dataset, split

    chosen = _configs(config, sets, None, seed, data)
    if len(chosen) != 1:
        raise UserError("partition: takes one seed")
    loaded = dataset(chosen[0])
    _say_shortage(loaded)
    parts = split(chosen[0], loaded)
    if save:
        parts.save(save)
    if picture:
        with plainly(picture):
            drawing.picture(parts, loaded.classes, picture)
    if as_json:
        typer.echo(json.dumps(parts.to_dict()))
        return
    table = Table(title=f"{chosen[0].data.name}, rule {parts.rule}, seed {parts.seed}", title_justify="left")
    heads, *rows = drawing.table(parts, loaded.classes)
    for name in heads:
        table.add_column(name)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    typer.echo(f"hash {parts.hash[:16]}, overlap {parts.overlap}")


@app.command(name="list")
@_mending
def list_(
    what: Annotated[str, typer.Argument(metavar="methods|datasets|models|experiments|options")] = "methods",
) -> None:
    """List what there is."""
    from fedsap.config import SECTIONS, options
    from fedsap.data import DATASETS
    from fedsap.methods import METHODS
    from fedsap.models import MODELS

    table = Table(show_header=True, box=None, pad_edge=False)
    if what == "methods":
        for name in ("method", "", "paper", "unlabelled", "sends"):
            table.add_column(name)
        for m in METHODS.values():
            table.add_row(
                m.name, m.title, m.paper, "needed" if m.needs_pool else "used" if m.uses_pool else "", m.sends
            )
    elif what in ("datasets", "models"):
        table.add_column(what[:-1])
        table.add_column("")
        for name, about in (DATASETS if what == "datasets" else MODELS).items():
            table.add_row(name, about)
    elif what == "options":
        for name in ("key", "default", "meaning"):
            table.add_column(name, overflow="fold")
        for section, keys in SECTIONS.items():
            for name, key in keys.model_fields.items():
                table.add_row(f"{section}.{name}", _default(key.default), key.description or "")
        for m in METHODS.values():
            for name, option in options(m).items():
                table.add_row(f"method.{m.name}.{name}", _default(option.default), option.metadata["about"])
    elif what == "experiments":
        from fedsap.experiments.catalogue import catalogue

        for name in ("experiment", "", "in the paper", "part of", "runs"):
            table.add_column(name)
        for one in catalogue().values():
            runs = len(list(one.places())) * len(one.seeds)
            table.add_row(one.name, one.title, one.place, one.group or "all", str(runs))
    else:
        raise UserError(f"list: got '{what}', takes methods, datasets, models, experiments or options")
    Console().print(table)


def _default(value: Any) -> str:
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@app.command()
@_mending
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders that fedsap run has written.")],
    out: Out = None,
    formats: Annotated[
        list[str] | None, typer.Option("--format", help="html, md or tex; may be repeated; all.")
    ] = None,
) -> None:
    """Write the report of one or more runs: a page, tables as Markdown and LaTeX, figures as PNG and PDF."""
    from fedsap.report import FORMATS, write_report

    for path in write_report(folders, out or folders[0], formats or FORMATS, _complain):
        typer.echo(f"report: {path}")


def _say_shortage(data: Any) -> None:
    from fedsap.data import shortage

    if said := shortage(data):
        _complain(said)


def _complain(line: str) -> None:
    typer.echo(f"fedsap: {line}", err=True)


@app.command()
@_mending
def ui(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where runs are, or will be.")],
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; another than this opens it to others.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: one that is free.")] = 8765,
) -> None:
    """Serve the report's page while runs are going; new rounds appear by themselves."""
    from fedsap.report.live import serve

    serve(folder, host, port, typer.echo)


@app.command()
@_mending
def bench(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[run] [CONFIG.toml]", help="'run': a whole run, part by part.")
    ] = None,
    sets: Set = None,
    method: Methods = None,
    seed: Seeds = None,
    data: DataRoot = None,
    clients: Annotated[
        list[int] | None, typer.Option("--clients", min=1, help="Clients; may be repeated. 20; on a GPU 1 to 200.")
    ] = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Times to measure each way; the median counts.")] = 5,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw it to this .png or .pdf.")] = None,
    as_json: Json = False,
) -> None:
    """Time steps of all clients as one stack against a plain PyTorch loop over them, or a whole run by its parts."""
    import torch

    from fedsap import bench as benchmark

    words = list(words or [])
    if words and words[0] == "run":
        given = [w for option, values in (("--set", sets), ("--method", method), ("--seed", seed)) for v in values or []
                 for w in (option, str(v))]  # fmt: skip
        found = benchmark.whole([*words[1:], *given, *(["--data", str(data)] if data else [])])
        typer.echo(json.dumps(found) if as_json else show.parts(found))
        return
    if len(words) > 1:
        raise UserError(f"bench: got '{words[1]}', takes run, or one configuration file")
    config = _configs(Path(words[0]) if words else None, sets, method, seed, data)[0]
    many = torch.cuda.is_available() and config.device != "cpu"
    found = benchmark.compare(config, clients or ([1, 5, 20, 60, 200] if many else [20]), repeat)
    if plot:
        benchmark.draw(found, plot)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        Console().print(show.steps(found))


@app.command()
@_mending
def doctor() -> None:
    """Say what this installation is and whether it works."""
    import torch

    from fedsap.data import DATASETS, load, search_path

    typer.echo(f"fedsap {fedsap.__version__}, Python {platform.python_version()}, {platform.platform()}")
    for name in (
        "torch",
        "numpy",
        "scipy",
        "scikit-learn",
        "pillow",
        "pydantic",
        "typer",
        "rich",
        "safetensors",
        "matplotlib",
        "jinja2",
    ):
        try:
            typer.echo(f"  {name} {version(name)}")
        except PackageNotFoundError:
            typer.echo(f"  {name}: missing")
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "none that torch can use"
    typer.echo(f"CUDA device: {cuda}; CPU threads: {torch.get_num_threads()}")
    typer.echo("data is looked for in: " + ", ".join(str(p) for p in search_path(None)))
    for name in DATASETS:
        if name == "folder":
            continue
        try:
            found = load(name)
            typer.echo(f"  {name}: {len(found.train.labels)} training and {len(found.test.labels)} test images")
        except UserError:
            typer.echo(f"  {name}: not found")


Client = Annotated[int | None, typer.Option("--client", help="Whose model, where MODEL is a run's folder.")]
OwnCode = Annotated[
    bool, typer.Option("--own-code", help="Import the method or network that the model names, if not fedsap's.")
]


@app.command()
@_mending
def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A run's folder, or a file of fedsap export.")],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGES...", help="Image files, and folders of them.")],
    client: Client = None,
    by: Annotated[str, typer.Option("--by", help="head, proto (nearest prototype by L2) or cos (by cosine).")] = "head",
    classes: Annotated[str, typer.Option("--classes", help="Choose among the client's own classes, or all.")] = "own",
    out: Annotated[Path | None, typer.Option("--out", help="Write the CSV to this file.")] = None,
    as_json: Json = False,
    own_code: OwnCode = False,
) -> None:
    """Say the class of images by one client's trained model, as CSV: class, score, next best class, and by how much.

    A file that cannot be read costs a line on standard error, and exit status 1 in the end.
    """
    from fedsap.answers import answer

    _place(out)
    if answer(_model(model, client, own_code), images, by, classes, out, as_json, _complain):
        raise typer.Exit(1)


@app.command()
@_mending
def export(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A run's folder, or a file of fedsap export.")],
    out: Annotated[Path, typer.Option("--out", help="The file to write: .safetensors or .onnx.")],
    client: Client = None,
    kind: Annotated[
        str | None, typer.Option("--format", help="safetensors or onnx; unset: as the name of --out ends.")
    ] = None,
    check: Annotated[
        list[Path] | None, typer.Option("--check", help="onnx: compare on these images; unset: test images.")
    ] = None,
    data: DataRoot = None,
    own_code: OwnCode = False,
) -> None:
    """Write one client's trained model to one file: for fedsap predict, or as ONNX for other programs."""
    kind = kind or out.suffix.removeprefix(".")
    if kind not in ("safetensors", "onnx"):
        raise UserError(f"--format: got '{kind}', takes safetensors or onnx")
    _place(out)
    found = _model(model, client, own_code)
    if kind == "onnx":
        from fedsap.export import OPSET, TOLERANCE, proof, write_onnx

        shown = proof(found, check or [], data)
        apart = write_onnx(out, found, shown)
        said = f", opset {OPSET}, on {len(shown)} images at most {apart:.1e} from fedsap's (tolerance {TOLERANCE:.0e})"
    else:
        from fedsap.saved import save_model

        save_model(out, found)
        said = ""
    about = ", ".join(f"{key} {value}" for key, value in found.about.items())
    typer.echo(f"{kind}: {out}, {out.stat().st_size / 1e3:.1f} kB ({about}){said}")


def _place(out: Path | None) -> None:
    """Complains of a file to write that has no place to be."""
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise UserError(f"--out: got {out}, takes a file in a folder that is there")


def _model(path: Path, client: int | None, own_code: bool) -> Any:
    """The model in a file or of a run's client."""
    from fedsap.from_run import of_run
    from fedsap.saved import load_model

    if not path.is_file():
        return of_run(path, client, own_code=own_code)
    found = load_model(path, own_code=own_code)
    if client not in (None, found.about.get("client")):
        raise UserError(f"--client: got {client}, but {path} holds client {found.about.get('client')}; leave it out")
    return found


@app.command()
@_mending
def certificates(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where they are written; nothing is overwritten.")],
    host: Annotated[
        list[str] | None, typer.Option("--host", help="Name or address of the server for nodes; may be repeated.")
    ] = None,
    node: Annotated[list[str] | None, typer.Option("--node", help="A node's name; may be repeated.")] = None,
) -> None:
    """Make a certificate authority with the server's certificate, and a key pair for each node of a federation."""
    from fedsap.deploy.certificates import write

    for path in write(folder, host or [], node or []):
        typer.echo(str(path))
    for name in node or []:
        typer.echo(f"flwr supernode register {folder / 'nodes' / name}.pub fedsap --name {name}")


Ca = Annotated[Path | None, typer.Option("--ca", help="Certificate of the authority, in PEM.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Without TLS and keys; for a trial on one machine.")]


@app.command()
@_mending
def server(
    host: Annotated[str, typer.Option("--host", help="Address of this machine alone; a proxy lets nodes in.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option("--port", min=1, max=65535)] = 8000,
    ca: Ca = None,
    cert: Annotated[Path | None, typer.Option("--cert", help="The server's certificate, in PEM.")] = None,
    key: Annotated[Path | None, typer.Option("--key", help="The key of --cert, in PEM.")] = None,
    database: Annotated[
        Path | None, typer.Option("--database", help="File that keeps nodes and runs; by default in the user's data.")
    ] = None,
    insecure: Insecure = False,
) -> None:
    """Start Flower's SuperLink: with TLS and node keys, closed to other machines, sending nothing to anybody."""
    from fedsap.deploy import need_flower
    from fedsap.deploy.start import become, server_arguments

    need_flower("server")
    become("flower-superlink", server_arguments(host, port, ca, cert, key, database, insecure))


@app.command()
@_mending
def node(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the federation calls this node.")],
    superlink: Annotated[str, typer.Option("--superlink", metavar="HOST:PORT", help="Where the server is reached.")],
    ca: Ca = None,
    key: Annotated[Path | None, typer.Option("--key", help="This node's private key.")] = None,
    data: Annotated[Path | None, typer.Option("--data", help="Folder of this node's data.")] = None,
    store: Annotated[
        Path | None, typer.Option("--store", help="Folder for its models; by default in the user's data.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="NODE.toml", help="This node's own keys: data, model, train.")
    ] = None,
    client_port: Annotated[
        int, typer.Option("--client-port", min=1, max=65535, help="On 127.0.0.1; another for each node of a machine.")
    ] = 9094,
    part: Annotated[
        str | None, typer.Option("--part", metavar="I/N", help="Hold part I of N of a known data set, not own data.")
    ] = None,
    insecure: Insecure = False,
) -> None:
    """Start Flower's SuperNode: this machine's part in a federation, which keeps its data and its models."""
    from fedsap.deploy import need_flower
    from fedsap.deploy.start import become, node_arguments

    need_flower("node")
    become(
        "flower-supernode", node_arguments(name, superlink, ca, key, data, store, config, client_port, insecure, part)
    )


def main() -> None:
    """Entry point. What the command line itself does not understand is one line, too."""
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], standalone_mode=False))
    except _NotUnderstood as error:
        at = error.ctx.command_path if error.ctx else "fedsap"
        typer.echo(f"fedsap: {error.format_message().rstrip('.')}; {at} --help says what it takes", err=True)
        sys.exit(2)
    except typer.Abort:
        sys.exit(1)


if __name__ == "__main__":
    main()
