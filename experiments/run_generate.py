"""Generates text with an offloaded Mixture-of-Experts model and says what it cost.

    python experiments/run_generate.py                                    the bundled demo model
    python experiments/run_generate.py --model DIRECTORY --cache-rate 0.25 --prompt "Once upon a time"
    python experiments/run_generate.py --model DIRECTORY --chat --prompt "Who wrote Faust?"

docs/families.md says which models run.

The new text goes to standard output and everything else to standard error, so `> story.txt` holds the text alone.
"""

import contextlib
import dataclasses
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from _prompts import UsageError, read_chat, read_prompts, token_id

# moe_jax is imported where it is needed: --help and a misspelt option need not wait for jax.

# What the demo model's card recommends.
DEMO_SAMPLING = {"do_sample": True, "temperature": 0.7, "top_k": 40, "repetition_penalty": 1.1}
SHOWN_OF_PROMPT = 300

STDERR = 2  # file descriptor

EXIT_FAULT, EXIT_USAGE, EXIT_INTERRUPT, EXIT_PIPE = 1, 2, 130, 141


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


def option(panel: str, text: str, *names: str, **settings: Any):
    """A typer option in a panel of --help."""
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **settings)


PROMPT, DRAW, CACHE, OUTPUT = "Prompt", "Choosing tokens", "Expert cache", "Output and figures"


@app.command(
    epilog="Exit codes: 0 done, 1 a fault while running, 2 a wrong option or input, 130 stopped by Ctrl-C (table and "
    "files asked for are still written). Terms are in docs/glossary.md, policies in docs/policies.md."
)
def main(
    model: Annotated[
        str | None,
        option(PROMPT, "Directory of a Hugging Face checkpoint, or a hub id. Default: the bundled demo model."),
    ] = None,
    prompt: Annotated[str | None, option(PROMPT, "Text to continue.")] = None,
    prompt_file: Annotated[str | None, option(PROMPT, "File with the text to continue; - is standard input.")] = None,
    batch: Annotated[
        int | None,
        option(
            PROMPT,
            "Sequences at a time: the prompt so many times, or the first N lines that are not blank of --prompt-file. "
            "The first one is shown live, all of them at the end.",
        ),
    ] = None,
    chat: Annotated[
        bool, option(PROMPT, "The prompt is a user's message, which the model answers by its chat template.", "--chat")
    ] = False,
    system: Annotated[str | None, option(PROMPT, "System message before it, with --chat.")] = None,
    chat_template: Annotated[
        str | None,
        option(PROMPT, "File with the chat template (Jinja) to use instead of the tokenizer's, with --chat."),
    ] = None,
    forced_bos: Annotated[
        str | None,
        option(
            PROMPT,
            "First token of an encoder-decoder's output, as its tokenizer writes it or its id: the language to "
            "translate into, such as deu_Latn.",
        ),
    ] = None,
    max_new_tokens: Annotated[int, option(PROMPT, "Most tokens to generate a sequence. Default: 128.")] = 128,
    do_sample: Annotated[
        bool | None,
        option(
            DRAW,
            "Draw tokens, or take the most likely one. Default: draw if an option below asks for it; else what "
            "generation_config.json says; the demo model draws with temperature 0.7, top-k 40, repetition penalty 1.1.",
            "--do-sample/--greedy",
        ),
    ] = None,
    temperature: Annotated[float | None, option(DRAW, "Divides the logits; 0 is greedy.")] = None,
    top_k: Annotated[int | None, option(DRAW, "Only the k most likely tokens; 0 is off.")] = None,
    top_p: Annotated[float | None, option(DRAW, "Only the likeliest tokens that reach this sum; 1 is off.")] = None,
    min_p: Annotated[float | None, option(DRAW, "Only tokens this much as likely as the likeliest; 0 is off.")] = None,
    repetition_penalty: Annotated[
        float | None, option(DRAW, "Above 1, tokens seen before are less likely, greedy or not; 1 is off.")
    ] = None,
    stop: Annotated[list[str] | None, option(DRAW, "Text that ends a sequence; may be given several times.")] = None,
    eos: Annotated[
        list[int] | None,
        option(DRAW, "Token id that ends a sequence, instead of the model's; may be given several times."),
    ] = None,
    ignore_eos: Annotated[
        bool, option(DRAW, "No token ends a sequence: always --max-new-tokens.", "--ignore-eos")
    ] = False,
    seed: Annotated[int | None, option(DRAW, "Of the draws: the same seed gives the same text. Default: 0.")] = None,
    transport: Annotated[
        str | None,
        option(
            CACHE,
            "How a missing expert reaches the device: device (inside the compiled program), callback (by the host), "
            "resident (nothing is ever missing) or auto. Default: auto.",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        option(
            CACHE, "Which experts keep a slot: lru, lfu, lfru, static or another of docs/policies.md. Default: lru."
        ),
    ] = None,
    expert_slots: Annotated[
        str | None,
        option(CACHE, "Expert slots of all layers together, or a comma-separated list with those of each layer."),
    ] = None,
    cache_rate: Annotated[float | None, option(CACHE, "Share of all experts that have a slot, such as 0.25.")] = None,
    expert_cache_bytes: Annotated[str | None, option(CACHE, "Bytes for expert slots, such as 12GB or 512MiB.")] = None,
    host_memory_bytes: Annotated[
        str | None,
        option(
            CACHE,
            "Most host memory for experts, such as 50GB; what does not fit is read from disk when it is needed. "
            "Default: 90 % of the machine's.",
        ),
    ] = None,
    host_policy: Annotated[
        str | None, option(CACHE, "Which experts stay in host memory if not all do. Default: lru.")
    ] = None,
    scope: Annotated[
        str | None, option(CACHE, "layer: each layer has its slots; global: one pool. Default: layer.")
    ] = None,
    contract: Annotated[
        str | None, option(CACHE, "atomic-bypass or atomic-forced-admit. Default: atomic-bypass.")
    ] = None,
    device_memory_ratio: Annotated[
        float | None, option(CACHE, "Share of device memory that may be used. Default: 0.75.")
    ] = None,
    prefetch: Annotated[
        str | None,
        option(
            CACHE,
            "Predictor by which experts are fetched before they are needed, with --transport callback or device: "
            "gate-1, cross-layer+temporal or another of docs/predictors.md. Default: none.",
        ),
    ] = None,
    prefetch_budget: Annotated[
        str | None,
        option(CACHE, "Most bytes that a layer may prefetch, such as 32MiB. Default: auto, what begins in time."),
    ] = None,
    no_prefetch_shutoff: Annotated[
        bool, option(CACHE, "Prefetch for layers that it makes slower, too.", "--no-prefetch-shutoff")
    ] = False,
    warm_start: Annotated[
        str | None,
        option(
            CACHE, "File with what the predictor learned of this checkpoint; read at the start, written at the end."
        ),
    ] = None,
    offload_path: Annotated[
        str | None, option(CACHE, "Directory for packed expert rows, reused by later runs.")
    ] = None,
    dtype: Annotated[
        str | None, option(CACHE, "float32, bfloat16, float16 or auto. Default: auto, the checkpoint's.")
    ] = None,
    config: Annotated[
        str | None, option(CACHE, "JSON file of configuration keys; options given here override it.")
    ] = None,
    json_path: Annotated[str | None, option(OUTPUT, "Write texts, ids, settings and figures here.", "--json")] = None,
    trace_path: Annotated[str | None, option(OUTPUT, "Write the routing here, an .npz file.", "--trace")] = None,
    link_gbps: Annotated[float | None, option(OUTPUT, "Host-to-device rate for the floor. Default: measured.")] = None,
    hbm_gbps: Annotated[float | None, option(OUTPUT, "Device memory rate for the floor. Default: measured.")] = None,
    verify: Annotated[
        bool, option(OUTPUT, "Compare every occupied slot with host memory afterwards.", "--verify")
    ] = False,
    verbose: Annotated[bool, option(OUTPUT, "Log what loading and compiling do.", "--verbose", "-v")] = False,
) -> None:
    """Continue a text with a Mixture-of-Experts model of which only a part of the experts is in device memory.

    Without options, the bundled demo model tells a story. With --cache-rate 0.25 a quarter of its experts have a slot
    on the device, and the table under the text says how often the others were needed, what moving them cost, and the
    least that it could have cost on this machine. Results never depend on the cache: try --policy, --cache-rate and
    --transport.
    """
    from moe_jax.errors import MoEJaxError
    from moe_jax.interrupts import keep_interrupts

    keep_interrupts()
    overrides = {
        "transport": transport,
        "policy": policy,
        "expert_slots": None if expert_slots is None else _slots(expert_slots),
        "cache_rate": cache_rate,
        "expert_cache_bytes": expert_cache_bytes,
        "host_memory_bytes": host_memory_bytes,
        "host_policy": host_policy,
        "prefetch": prefetch,
        "prefetch_budget": prefetch_budget,
        "prefetch_shutoff": False if no_prefetch_shutoff else None,
        "warm_start": warm_start,
        "scope": scope,
        "contract": contract,
        "device_memory_ratio": device_memory_ratio,
        "offload_path": offload_path,
        "dtype": dtype,
        "seed": seed,
    }
    sampling = {
        "do_sample": do_sample,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "stop": stop or None,
        "eos_token_id": [] if ignore_eos else eos or None,
    }
    files = {"--json": json_path, "--trace": trace_path}
    try:
        files = {flag: _writable(flag, path) for flag, path in files.items()}
        if ignore_eos and eos:
            raise UsageError("--eos and --ignore-eos contradict each other: give one of them")
        settings = _settings(config, overrides, batch)
        sampling = _sampling(sampling, max_new_tokens, demo=model is None)
        rates = _rates(link_gbps, hbm_gbps)
        _check_verify(verify, settings)
        chat = read_chat(chat, system, chat_template)
        prompts = read_prompts(prompt, prompt_file, batch, demo=model is None and chat is None)
        record = files["--trace"] is not None
        run = Run(model, settings, prompts, sampling, max_new_tokens, rates, record, verify, verbose, chat, forced_bos)
    except (MoEJaxError, UsageError, OSError, MemoryError) as error:
        _fail(error, EXIT_FAULT if isinstance(error, MemoryError) else EXIT_USAGE)
    except KeyboardInterrupt:
        _fail("stopped while loading", EXIT_INTERRUPT)
    with run.moe:
        code = run.generate()
        try:
            run.report(files["--json"], files["--trace"])
        except (MoEJaxError, OSError, RuntimeError) as error:
            _fail(error, EXIT_FAULT)
    raise typer.Exit(code)


def _fail(error: object, code: int):
    """One line on standard error, then the end."""
    print(f"run_generate: {error}", file=sys.stderr)
    raise typer.Exit(code)


# --------------------------------------------------------------------------------------------------- what was asked for


def _slots(text: str) -> int | list[int]:
    try:
        slots = [int(part) for part in text.split(",")]
    except ValueError:
        _fail(f"--expert-slots={text!r}: give an integer, or one for each MoE layer separated by commas", EXIT_USAGE)
    return slots if "," in text else slots[0]


def _settings(config_file, overrides, batch):
    from moe_jax import OffloadConfig

    given = {key: value for key, value in overrides.items() if value is not None}
    settings = OffloadConfig.parse(config_file).replace(**given)
    if batch is not None:
        if batch < 1:
            raise UsageError(f"--batch={batch}: at least one sequence is needed")
        settings = settings.replace(max_batch=max(batch, settings.max_batch))
    return settings


def _sampling(given, max_new_tokens, demo):
    """What to pass to the model, checked before anything is loaded."""
    from moe_jax import SamplingParams
    from moe_jax.errors import ConfigError

    given = {key: value for key, value in given.items() if value is not None}
    SamplingParams(max_new_tokens=max_new_tokens, **given)
    drawing = [name for name in ("temperature", "top_k", "top_p", "min_p") if given.get(name)]
    if given.get("do_sample") is False and drawing:
        options = ", ".join(f"--{name.replace('_', '-')}={given[name]}" for name in drawing)
        raise ConfigError(f"--greedy takes the most likely token, so {options} has no effect: leave one of them out")
    if drawing:
        given["do_sample"] = True
    if demo:
        defaults = DEMO_SAMPLING
        if given.get("do_sample") is False:
            defaults = {"repetition_penalty": DEMO_SAMPLING["repetition_penalty"]}
        given = defaults | given
    return given


def _rates(link_gbps, hbm_gbps):
    for flag, rate in (("--link-gbps", link_gbps), ("--hbm-gbps", hbm_gbps)):
        if rate is not None and not 0 < rate < float("inf"):
            raise UsageError(f"{flag}={rate}: give a positive rate in GB/s")
    return link_gbps, hbm_gbps


def _check_verify(verify, settings):
    if verify and settings.transport == "resident":
        raise UsageError(
            "--verify compares slots with host memory, and transport 'resident' keeps no experts there: "
            "choose --transport device or callback"
        )


def _writable(flag: str, path: str | None) -> Path | None:
    """The path, once it is known that a file can be written there: not after a long run."""
    from _outputs import check_writable

    if path is None:
        return None
    path = Path(path)
    if flag == "--trace" and path.suffix != ".npz":
        raise UsageError(f"{flag}={path}: the name must end in .npz")
    check_writable(flag, path)
    return path


# -------------------------------------------------------------------------------------------------------------- the run


class Run:
    """A loaded model and what it generated so far.

    Ctrl-C while generating ends the run after the current decode chunk, so that its figures and files are whole; a
    second one interrupts at once.
    """

    after_prompt = ""  # between a prompt and the new text

    def __init__(
        self, model, settings, prompts, sampling, max_new_tokens, rates, record, verify, verbose, chat, forced_bos
    ):
        import logging

        from rich.console import Console

        from moe_jax import MoE, demo_model_path
        from moe_jax.floors import find_ceilings
        from moe_jax.generation.inputs import prepare

        if verbose:
            logging.basicConfig(format="%(name)s: %(message)s")
            for package in ("moe_jax", "host_offload"):
                logging.getLogger(package).setLevel(logging.INFO)
        warnings.showwarning = lambda message, *_: print(f"run_generate: warning: {message}", file=sys.stderr)
        self.console = Console(stderr=True, highlight=False)
        self.prompts, self.settings, self.max_new_tokens = prompts, settings, max_new_tokens
        if chat is not None:
            self.after_prompt = "\n"
        self.verify = verify
        self.moe = MoE(demo_model_path() if model is None else model, settings)
        try:
            _check_verify(verify, self.moe.config)  # "auto" is resolved now
            if self.moe.tokenizer is None:
                raise UsageError(
                    f"{self.moe.name} has no tokenizer that loads, and this command continues texts: put "
                    "tokenizer.json beside the weights, or generate from ids in Python, "
                    "MoE(directory).generate([1, 2, 3])"
                )
            if forced_bos is not None:
                sampling = sampling | {"forced_bos_token_id": token_id(self.moe.tokenizer, forced_bos)}
            self.sampling = sampling
            vocabulary = self.moe.model_config.vocab_size
            for token in sampling.get("eos_token_id", []):
                if token >= vocabulary:
                    raise UsageError(f"--eos={token}: the model's ids are 0 to {vocabulary - 1}")
            inputs = {"inputs": prompts} if chat is None else chat.encode(self.moe.tokenizer, prompts)
            # The prompt alone: what of it and its continuation fits is for `stream_ids` to say.
            limits = {"vocab_size": vocabulary, "max_length": self.moe.max_sequence_length}
            batch = prepare(**inputs, **limits, tokenizer=self.moe.tokenizer)
            with warnings.catch_warnings(action="ignore"):  # the call below gives the same ones
                self.resolved = dataclasses.asdict(self.moe.sampling_params(max_new_tokens, **sampling))
            self.ceilings = find_ceilings(*rates)
            self.chunks = self.moe.stream_ids(**inputs, max_new_tokens=max_new_tokens, trace=record, **sampling)
        except BaseException:
            self.moe.close()
            raise
        self.prompt_tokens = batch.lengths.tolist()
        self.new_ids: list[list[int]] = [[] for _ in prompts]
        self.interrupted = False
        self.fault: str | None = None

    def generate(self) -> int:
        """Streams the text of the first sequence, keeps the ids of all; returns the exit code."""
        from moe_jax.errors import MoEJaxError
        from moe_jax.generation.text import IncrementalDecoder

        self._dim(_shown(self.prompts[0]) + self.after_prompt)
        decoder = IncrementalDecoder(self.moe.tokenizer, skip_special_tokens=True)
        code = 0
        try:
            with contextlib.closing(self.chunks), _interrupts(self):
                for pieces in self.chunks:
                    for row, ids in enumerate(pieces):
                        self.new_ids[row].extend(ids)
                    _write(decoder.push(pieces[0]))
                    if self.interrupted:
                        code = EXIT_INTERRUPT
                        break
            _write(decoder.flush() + "\n")
            if len(self.prompts) > 1:
                self._show_all()
        except OSError as error:  # of standard output: what fails in the model is a MoEJaxError
            # The interpreter must not fail on its last flush of what is left.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):  # the reader has gone, as with `| head`
                code = EXIT_PIPE
            else:
                self.fault, code = f"the text cannot be written to standard output: {error.strerror}", EXIT_FAULT
                print(f"run_generate: {self.fault}", file=sys.stderr)
        except KeyboardInterrupt:
            self.interrupted, code = True, EXIT_INTERRUPT
        except MoEJaxError as error:
            self.fault, code = str(error), EXIT_FAULT
            _write(decoder.flush() + "\n")
            print(f"run_generate: {error}", file=sys.stderr)
        return code

    def _show_all(self):
        for row, text in enumerate(self.texts()):
            self._dim(f"\n[{row}] {_shown(self.prompts[row])}{self.after_prompt}")
            _write(text + "\n")

    def _dim(self, text: str):
        self.console.print(text, style="dim", end="", markup=False, soft_wrap=True)
        self.console.file.flush()  # the text goes on in standard output

    def texts(self) -> list[str]:
        """The new text of every sequence."""
        return [self.moe.tokenizer.decode(ids, skip_special_tokens=True) for ids in self.new_ids]

    def report(self, json_path: Path | None, trace_path: Path | None) -> None:
        """Prints the table and writes the files.

        Raises RuntimeError if a slot differs from host memory, MoEJaxError or OSError if a file cannot be written.
        """
        from _outputs import write_json
        from _report import figures, size, table

        moe, note = self.moe, lambda text: self.console.print(text, style="dim", markup=False)
        if moe.stats()["last"] is None:  # a second Ctrl-C came before the call was set up
            note("\nstopped before anything was done")
            return
        run = figures(moe, self.prompt_tokens, [len(ids) for ids in self.new_ids], self.ceilings)
        self.console.print()
        if self.interrupted:
            note(f"stopped by Ctrl-C after {run['new_tokens']} new tokens")
        self.console.print(table(moe, run))
        verified = None
        if self.verify:
            moe.verify_slots()
            verified = moe.stats()["occupied_slots"]
            note(f"verified: {verified} occupied slots equal host memory byte for byte")
        if trace_path is not None and not moe.stats()["last"]["prefill"]["tokens"]:
            note(f"no trace was written to {trace_path}: no token was processed")
        elif trace_path is not None:
            trace = moe.trace()
            trace.save(trace_path)
            note(f"trace: {trace_path}, {len(trace.experts)} tokens, {size(trace_path.stat().st_size)}")
        if json_path is not None:
            write_json(json_path, self._content(run, verified))
            note(f"json: {json_path}")

    def _content(self, run, verified) -> dict[str, Any]:
        import jax

        import moe_jax

        moe = self.moe
        return {
            "moe_jax": moe_jax.__version__,
            "jax": jax.__version__,
            "device": jax.devices()[0].device_kind,
            "model": moe.name,
            "fingerprint": moe.fingerprint,
            "config": moe.config.to_dict(),
            "sampling": {"max_new_tokens": self.max_new_tokens, **self.sampling},
            "sampling_resolved": self.resolved,
            "interrupted": self.interrupted,
            "fault": self.fault,
            "verified_slots": verified,
            "sequences": [
                {"prompt": prompt, "prompt_tokens": length, "new_ids": ids, "text": text}
                for prompt, length, ids, text in zip(
                    self.prompts, self.prompt_tokens, self.new_ids, self.texts(), strict=True
                )
            ],
            "figures": run,
            "stats": moe.stats(),
        }


@contextlib.contextmanager
def _interrupts(run: Run):
    """Turns the first Ctrl-C into a wish to stop at the next chunk."""

    def on_interrupt(signum, frame):
        if run.interrupted:
            raise KeyboardInterrupt
        run.interrupted = True
        # A step that still compiles takes its time: say that the wish was heard. Not by print: the interrupt may have
        # come inside a print, and buffered writers refuse to be entered twice.
        os.write(STDERR, b"\nrun_generate: stopping at the next chunk; Ctrl-C again stops at once\n")

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _shown(prompt: str) -> str:
    return prompt if len(prompt) <= SHOWN_OF_PROMPT else f"... {prompt[-SHOWN_OF_PROMPT:]}"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    app()
