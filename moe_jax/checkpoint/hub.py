"""A model's name or path to a local checkpoint directory, downloading from a Hugging Face hub where needed."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from moe_jax.errors import CheckpointError

# Weights, configuration, tokenizer (SentencePiece, tiktoken, BPE merges) and chat template.
WANTED = ["*.safetensors", "*.json", "*.model", "*.tiktoken", "*.txt", "*.jinja"]
# Subfolders and consolidated files hold the same weights again in another layout (gpt-oss, Mixtral).
UNWANTED = ["*/*", "consolidated*"]


def resolve(
    name_or_path: str | os.PathLike, revision: str | None = None, cache_dir: str | os.PathLike | None = None
) -> Path:
    """The directory of a checkpoint: `name_or_path` itself if it is a directory, else that hub id's snapshot.

    `revision`: branch, tag or commit of the hub repository; `cache_dir`: where snapshots are kept (default: the hub
    client's cache). HF_ENDPOINT names another hub, HF_TOKEN is the access token; a snapshot that was fetched before is
    used when the hub cannot be reached. The client draws its own progress bars.
    Raises `CheckpointError` that says what was looked for, where, and what to do.
    """
    name = os.fspath(name_or_path)
    if not name:  # Path("") would be the current directory
        raise CheckpointError("the model's name is empty: give a directory or a hub id (owner/name)")
    path = Path(name).expanduser()
    if path.is_dir():
        if revision is not None:
            raise CheckpointError(
                f"revision={revision!r} needs a hub id, but {name} is a local directory: leave it out"
            )
        return path
    if path.exists():
        raise CheckpointError(f"{name} is a file: give {path.parent}, the directory of config.json and the weights")
    try:
        validate_repo_id(name)
        local = name.startswith((".", "~"))
    except HFValidationError:
        local = True
    if local:
        raise CheckpointError(f"{name}: no such directory, and it cannot be a hub id (owner/name).{_near(path)}")
    return _download(name, path, revision, cache_dir)


def _download(name: str, path: Path, revision: str | None, cache_dir: str | os.PathLike | None) -> Path:
    # Read here as well: the client reads HF_ENDPOINT only once, when it is imported.
    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    asked = f"{name} is no local directory, and the hub at {endpoint}"
    try:
        found = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            cache_dir=cache_dir,
            endpoint=endpoint,
            allow_patterns=WANTED,
            ignore_patterns=UNWANTED,
        )
    except GatedRepoError as error:
        raise CheckpointError(
            f"{asked} gives {name} only to accounts that accepted its terms: accept them there and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{asked} has no such model (or a private one: set HF_TOKEN). Check the spelling.{_near(path)}"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"{asked} has the model but not revision {revision!r}: name a branch, tag or commit"
        ) from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{asked} could not be reached, nor is a complete snapshot in the cache: check the network, HF_ENDPOINT "
            f"and HF_HUB_OFFLINE, or give a local directory.{_near(path)}"
        ) from error
    except HfHubHTTPError as error:
        raise CheckpointError(f"{asked} answered with an error ({error}): try again later") from error
    except OSError as error:
        raise CheckpointError(f"downloading {name} from {endpoint} failed: {error}") from error
    snapshot = Path(found)
    if not any(snapshot.glob("*.safetensors")):
        raise CheckpointError(
            f"{name} at {endpoint} has no safetensors weights at its top level: use a repository that has, or download "
            f"it (hf download {name} --local-dir DIR) and convert it (python -m moe_jax.convert DIR DIR-safetensors)"
        )
    return snapshot


def _near(path: Path) -> str:
    """\" Did you mean ...?\" with the directories next to `path` that are spelled like it, or nothing."""
    parent = path.parent
    if not parent.is_dir():
        return f" The folder {parent} does not exist." if path.is_absolute() else ""
    names = [entry.name for entry in parent.iterdir() if entry.is_dir()]
    matches = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(str(parent / match) for match in matches)}?" if matches else ""
