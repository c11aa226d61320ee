"""``tenplexfs dataset ...``: add to a job, show, remove, compare what the mount delivers with the order."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Annotated, Any

import typer

from tenplexfs._pb import dataset_pb2
from tenplexfs.cli import show
from tenplexfs.cli.client import job_content
from tenplexfs.cli.plans import check_last
from tenplexfs.cli.session import Session, command
from tenplexfs.errors import CorruptError, NotFoundError, PreconditionError, UsageError

__all__ = ["app"]

app = typer.Typer(help="Datasets of jobs: add, show, remove, verify.", no_args_is_help=True)
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The job.")]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The dataset: letters, digits, _ . -")]

KINDS = "npy, npz, records, megatron, tenplex or files"


@command(app, "add")
def add(
    session: Session,
    *,
    job: JobArgument,
    name: NameArgument,
    source: Annotated[
        list[str], typer.Option(metavar="PATH|GLOB|URL", help="Files in order; may be given several times.")
    ],
    kind: Annotated[str, typer.Option(help=f"{KINDS}; default: by the names of the files.")] = "",
    members: Annotated[
        bool, typer.Option("--members", help="Samples are the arrays in .npz files, not the files.")
    ] = False,
    global_batch: Annotated[int, typer.Option(min=0, help="Samples of a step; default: the layout's.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of the order.")] = 0,
    shuffle: Annotated[
        bool | None, typer.Option("--shuffle/--no-shuffle", help="Default: yes, unless unsplit.")
    ] = None,
    tail: Annotated[
        str,
        typer.Option(
            metavar="drop|keep", help="The last batch of an epoch; default: the layout's, else drop."
        ),
    ] = "",
    unsplit: Annotated[
        bool, typer.Option("--unsplit", help="Every rank sees all samples: a validation set.")
    ] = False,
    record_bytes: Annotated[int, typer.Option(min=0, help="records: size of each.")] = 0,
    skip_bytes: Annotated[int, typer.Option(min=0, help="records: size of what stands before.")] = 0,
    dtype: Annotated[str, typer.Option(help="records: of the elements, as numpy names it.")] = "",
    shape: Annotated[str, typer.Option(metavar="N,N,...", help="records: of each.")] = "",
    sequence_length: Annotated[
        int, typer.Option(min=0, help="megatron: tokens of a sample; default: a document each.")
    ] = 0,
    epoch: Annotated[int, typer.Option(min=0, help="Where training is: the epoch.")] = 0,
    consumed: Annotated[int, typer.Option(min=0, help="Where training is: samples of the epoch.")] = 0,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.001, help="How long to wait.")
    ] = None,
) -> None:
    """Add a dataset to a job: build its index, check it, and switch to a snapshot that has it."""
    if tail not in ("", "drop", "keep"):
        raise UsageError(f"--tail {tail!r}: need drop or keep")
    try:
        extents = [int(part) for part in shape.split(",")] if shape else []
    except ValueError as error:
        raise UsageError(f"--shape {shape!r}: need numbers, as 512,512,3") from error
    request = dataset_pb2.AddDatasetRequest(
        job=job,
        name=name,
        sources=[one if "://" in one else str(Path(one).absolute()) for one in source],
        kind=kind,
        members=members,
        record_bytes=record_bytes,
        skip_bytes=skip_bytes,
        dtype=dtype,
        shape=extents,
        sequence_length=sequence_length,
        global_batch=global_batch,
        seed=seed,
        shuffle=shuffle,
        tail=tail,
        unsplit=unsplit,
        epoch=epoch,
        consumed=consumed,
        request_id=uuid.uuid4().hex,
    )
    with session.connect() as daemon:
        last = show.progress(daemon.add_dataset(request, timeout), f"{job}: {name}", quiet=session.json)
    check_last(last, f"dataset add {job} {name}")
    assert last is not None
    content = {
        "job": job_content(last.job),
        "dataset": _datasets(last.job.settings_json).get(name),
        "message": last.message,
    }
    session.emit("dataset", content, lambda: typer.echo(f"{job}: {name}: {last.message}"))


@command(app, "show")
def show_datasets(
    session: Session,
    *,
    job: JobArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="One dataset; else all.")] = "",
) -> None:
    """Show the datasets of a job, and where training is in them."""
    with session.connect() as daemon:
        found = _datasets(daemon.job(job).settings_json)
        mount = daemon.status().mount
    if name and name not in found:
        raise NotFoundError(f"job {job}: no dataset {name}; there are: {', '.join(found) or 'none'}")
    chosen = {one: _shown(mount, job, one, found[one]) for one in ([name] if name else found)}
    rows = [
        (
            one,
            entry["kind"],
            entry["count"],
            entry["cursor"]["global_batch"],
            entry["cursor"]["epoch"],
            entry["cursor"]["consumed"],
            "unsplit" if entry["unsplit"] else "shuffled" if entry["shuffle"] else "in order",
            " ".join(entry["sources"]),
        )
        for one, entry in chosen.items()
    ]
    head = ["dataset", "kind", "samples", "batch", "epoch", "consumed", "order", "source"]

    def person() -> None:
        if rows:
            show.table(head, rows, numbers=(2, 3, 4, 5))
        else:
            typer.echo("no datasets")

    session.emit("datasets", {"job": job, "datasets": chosen}, person)


@command(app, "remove")
def remove(
    session: Session,
    *,
    job: JobArgument,
    name: NameArgument,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.001, help="How long to wait.")
    ] = None,
) -> None:
    """Switch a job to a snapshot without a dataset; its source is left alone."""
    request = dataset_pb2.RemoveDatasetRequest(job=job, name=name, request_id=uuid.uuid4().hex)
    with session.connect() as daemon:
        last = show.progress(daemon.remove_dataset(request, timeout), f"{job}: {name}", quiet=session.json)
    check_last(last, f"dataset remove {job} {name}")
    assert last is not None
    content = {"job": job_content(last.job), "dataset": name}
    session.emit("dataset-remove", content, lambda: typer.echo(f"{job}: {name} is removed"))


@command(app, "verify")
def verify(
    session: Session,
    *,
    job: JobArgument,
    name: NameArgument,
    epoch: Annotated[int | None, typer.Option(min=0, help="Default: where training is.")] = None,
    samples: Annotated[
        int, typer.Option(min=0, help="Samples of each rank to compare with the source; 0: all.")
    ] = 1000,
) -> None:
    """Read what the mount delivers and compare it: ids with the order, bytes with the source."""
    with session.connect() as daemon:
        mount = daemon.status().mount
    if not mount:
        raise PreconditionError("dataset verify: the daemon has no mount to read")
    directory = Path(mount) / job / "dataset" / name
    try:
        meta = json.loads((directory / "meta.json").read_text())
    except FileNotFoundError as error:
        raise NotFoundError(f"job {job}: no dataset {name}") from error
    number = meta["cursor"]["epoch"] if epoch is None else epoch
    # here: other commands start without what reads datasets
    from tenplexfs.cli.deliveries import check_rank, check_ranks_together

    wrong = check_ranks_together(directory, meta, number)
    store = json.loads((Path(mount) / ".tenplexfs" / "status.json").read_text())["store"]["path"]
    compared = 0
    for rank in range(meta["degree"]):
        count, found = check_rank(
            directory / str(number) / str(rank), Path(store) / "indexes" / meta["index"], samples
        )
        compared += count
        wrong += found
    content: dict[str, Any] = {
        "job": job,
        "dataset": name,
        "epoch": number,
        "ranks": meta["degree"],
        "samples": compared,
    }
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise CorruptError(f"dataset {name}: {wrong[0]}{more}", **content, wrong=wrong)
    line = f"{name}: epoch {number}: {meta['degree']} ranks in order, {compared} samples as in the source"
    session.emit("dataset-verify", content, lambda: typer.echo(line))


def _datasets(settings_json: str) -> dict[str, dict[str, Any]]:
    return dict(json.loads(settings_json or "{}").get("datasets", []))


def _shown(mount: str, job: str, name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Returns what is recorded of a dataset, with the cursor as the mount derives it."""
    cursor = entry["start"]
    if mount:
        try:
            cursor = json.loads((Path(mount) / job / "dataset" / name / "meta.json").read_text())["cursor"]
        except OSError as error:
            show.note(f"{name}: {error}")
    return {**entry, "cursor": cursor}
