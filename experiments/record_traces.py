"""Records which experts a model uses on given texts: one trace over all documents, ids and weights only, no text.

    python experiments/record_traces.py --text stories.txt --text code.jsonl --out run.npz
    python experiments/record_traces.py --model DIRECTORY --text corpus.jsonl.xz --documents 4 --out run.parquet

Of every document the first tokens are the prompt, and the model writes on from there. Each document is one request of
the trace, and `header["domains"]` names its domain. What was recorded stays on disk document by document, so that a run
that was stopped goes on where it was: start it again with the same options.
"""

import hashlib
import json
import lzma
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

SEPARATOR = "<|endoftext|>"
EXIT_FAULT, EXIT_USAGE, EXIT_INTERRUPT = 1, 2, 130

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class UsageError(Exception):
    """The options contradict each other or name what is not there."""


class Document(NamedTuple):
    domain: str
    ids: list[int]  # the prompt


def read_texts(path: Path) -> Iterator[tuple[str, str]]:
    """(domain, text) of each document of a `.txt` or `.jsonl` file, which may be compressed (`.xz`).

    Documents of a `.txt` file are separated by `<|endoftext|>`, and the file's name is their domain. A line of a
    `.jsonl` file is an object with `text` and, unless the file's name is to be the domain, `domain`. Raises UsageError.
    """
    stem, kind = path.name.removesuffix(".xz").rpartition(".")[::2]
    if kind not in ("txt", "jsonl"):
        raise UsageError(f"--text={path}: expected .txt or .jsonl, or one of them with .xz")
    try:
        raw = path.read_bytes()
        text = (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode()
    except (OSError, lzma.LZMAError) as error:
        raise UsageError(f"--text={path}: cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--text={path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    if kind == "txt":
        yield from ((stem, part.strip()) for part in text.split(SEPARATOR) if part.strip())
        return
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            document, domain = record["text"], record.get("domain", stem)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"--text={path}: line {number}: expected an object with text: {error!r}") from error
        yield str(domain), document


def choose(texts, tokenizer, prompt_tokens: int, new_tokens: int, documents: int | None) -> tuple[list[Document], int]:
    """The first `documents` of each domain that are long enough, and how many were too short.

    A document must go on for `new_tokens` after the prompt, so that the model is not asked to write past its end.
    """
    chosen, taken, short = [], Counter(), 0
    for domain, text in texts:
        if documents is not None and taken[domain] == documents:
            continue
        # Four bytes a character at most and at least one token a few bytes: no need to encode a whole book.
        ids = tokenizer(text[: 16 * (prompt_tokens + new_tokens)])["input_ids"]
        if len(ids) < prompt_tokens + new_tokens:
            short += 1
            continue
        taken[domain] += 1
        chosen.append(Document(domain, ids[:prompt_tokens]))
    return chosen, short


def record(moe, document: Document, recipe: dict[str, Any], part: Path):
    """The trace of one document: from `part` if this recipe made it before, else recorded and kept there."""
    from host_offload.trace import Trace

    made_of = recipe | {"prompt": hashlib.sha256(json.dumps(document.ids).encode()).hexdigest()}
    if part.exists():
        kept = Trace.load(part)
        if kept.header["recipe"] == made_of:
            return kept
    moe.generate(document.ids, recipe["new_tokens"], seed=recipe["seed"], trace=True, **recipe["sampling"])
    trace = moe.trace()
    trace.header["recipe"] = made_of
    trace.save(part)
    return trace


def join(traces: list, documents: list[Document], recipe: dict[str, Any]):
    """One trace of all documents; its header says how it was made, and the domain of every request."""
    from host_offload.trace import concatenate

    header = {name: value for name, value in traces[0].header.items() if name != "recipe"}
    header["domains"] = [document.domain for document in documents]
    header |= {name: recipe[name] for name in ("prompt_tokens", "new_tokens", "sampling", "seed")}
    return concatenate(traces, header=header)


@app.command()
def main(
    text: Annotated[list[Path], typer.Option(help="File of documents, .txt or .jsonl, perhaps .xz. May be repeated.")],
    out: Annotated[Path, typer.Option(help="The trace to write, .npz or .parquet.")],
    model: Annotated[str | None, typer.Option(help="Checkpoint directory or hub id. Default: the demo model.")] = None,
    config: Annotated[Path | None, typer.Option(help="JSON file of configuration keys for the model.")] = None,
    documents: Annotated[int | None, typer.Option(min=1, help="Most documents of a domain. Default: all.")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a document that are the prompt.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to write after it.")] = 96,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most likely token.")] = 0.7,
    top_k: Annotated[int, typer.Option(min=0, help="Of the k most likely tokens; 0 is off.")] = 40,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1, seen tokens are less likely.")] = 1.1,
    seed: Annotated[int, typer.Option(help="Of the draws; document i draws with seed + i.")] = 0,
) -> None:
    """Record the expert routing of a model over the documents of text files."""
    from _outputs import check_writable

    from moe_jax.errors import MoEJaxError
    from moe_jax.interrupts import keep_interrupts

    keep_interrupts()
    parts = out.with_name(out.name + ".parts")
    try:
        if out.suffix not in (".npz", ".parquet"):
            raise UsageError(f"--out={out}: the name must end in .npz or .parquet")
        try:
            check_writable("--out", out)
        except OSError as error:
            raise UsageError(str(error)) from error
        texts = [document for path in text for document in read_texts(path)]
        sampling = {"repetition_penalty": repetition_penalty, "do_sample": temperature > 0}
        if temperature > 0:
            sampling |= {"temperature": temperature, "top_k": top_k}
        recipe = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "sampling": sampling, "seed": seed}
        _run(texts, out, parts, model, config, documents, recipe)
    except (UsageError, MoEJaxError, OSError) as error:
        print(f"record_traces: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAULT) from error
    except KeyboardInterrupt as error:
        print(f"record_traces: stopped; what is recorded lies in {parts}: the same command goes on", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPT) from error


def _run(texts, out, parts, model, config, documents, recipe):
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from moe_jax import MoE, demo_model_path

    console = Console(stderr=True, highlight=False)
    with MoE(demo_model_path() if model is None else model, config) as moe:
        if moe.tokenizer is None:
            raise UsageError(f"--model={model}: has no tokenizer, which the text needs")
        chosen, short = choose(texts, moe.tokenizer, recipe["prompt_tokens"], recipe["new_tokens"], documents)
        if not chosen:
            least = recipe["prompt_tokens"] + recipe["new_tokens"]
            raise UsageError(
                f"none of the {len(texts)} documents has {least} tokens: give longer ones, or lower --prompt-tokens or "
                "--new-tokens"
            )
        recipe = recipe | {"model": moe.fingerprint}
        parts.mkdir(exist_ok=True)
        traces = []
        columns = TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("", total=len(chosen))
            for index, document in enumerate(chosen):
                progress.update(task, description=document.domain)
                of_document = recipe | {"seed": recipe["seed"] + index}
                traces.append(record(moe, document, of_document, parts / f"{index:05}.npz"))
                progress.advance(task)
    trace = join(traces, chosen, recipe)
    trace.save(out)
    shutil.rmtree(parts)
    rows, domains = len(trace.experts), len(set(trace.header["domains"]))
    skipped = f" ({short} documents were too short)" if short else ""
    console.print(
        f"{out}: {rows} tokens of {len(chosen)} documents, {domains} domains, {out.stat().st_size:,} bytes{skipped}"
    )


if __name__ == "__main__":
    app()
