"""The built-in models by name: sizes from the papers, weights never loaded."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.cost_models.errors import UsageError
from autopar.models.gpt import BERT, GPT, BERTConfig, GPTConfig
from autopar.models.huggingface import from_config
from autopar.models.llama import Llama, LlamaConfig
from autopar.models.vision import ResNet, ResNetConfig, ViT, ViTConfig

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Callable[..., Any] | None]
_BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A built-in model.

    Attributes:
        config: its sizes; for a transformers model the fields of its configuration.
        dtype: of the parameters.
        about: one line for people.
    """

    config: GPTConfig | BERTConfig | LlamaConfig | ViTConfig | ResNetConfig | Mapping[str, Any]
    dtype: torch.dtype = torch.float32
    about: str = ""

    @property
    def sequence(self) -> int | None:
        """Longest sequence that it takes, or None for images."""
        if isinstance(self.config, Mapping):
            return int(self.config["n_positions"])
        return getattr(self.config, "sequence", None)


def _entries() -> dict[str, Entry]:
    t5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "n_positions": 512, "d_model": 768}
    t5 |= {"d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "vocab_size": 32128, "dropout_rate": 0.1}
    t5 |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    llama, mixtral = "grouped attention, gated feed-forward", "8 experts, 2 chosen, dense dispatch"
    return {
        "gpt2": Entry(config=GPTConfig(num_layers=12, width=768, num_heads=12), about="decoder, tied head"),
        "gpt2-medium": Entry(config=GPTConfig(num_layers=24, width=1024, num_heads=16), about="decoder, tied head"),
        "gpt2-large": Entry(config=GPTConfig(num_layers=36, width=1280, num_heads=20), about="decoder, tied head"),
        "gpt2-xl": Entry(config=GPTConfig(num_layers=48, width=1600, num_heads=25), about="decoder, tied head"),
        "gpt3-175b": Entry(
            config=GPTConfig(num_layers=96, width=12288, num_heads=96, sequence=2048),
            dtype=_BF16,
            about="decoder, tied head",
        ),
        "llama3-8b": Entry(
            config=LlamaConfig(num_layers=32, width=4096, num_heads=32, num_kv_heads=8, hidden=14336),
            dtype=_BF16,
            about=llama,
        ),
        "llama3-70b": Entry(
            config=LlamaConfig(num_layers=80, width=8192, num_heads=64, num_kv_heads=8, hidden=28672),
            dtype=_BF16,
            about=llama,
        ),
        "llama3-405b": Entry(
            config=LlamaConfig(num_layers=126, width=16384, num_heads=128, num_kv_heads=8, hidden=53248),
            dtype=_BF16,
            about=llama,
        ),
        "mixtral-8x7b": Entry(
            config=LlamaConfig(
                num_layers=32,
                width=4096,
                num_heads=32,
                num_kv_heads=8,
                hidden=14336,
                vocabulary=32000,
                rope_theta=1e6,
                num_experts=8,
            ),
            dtype=_BF16,
            about=mixtral,
        ),
        "bert": Entry(config=BERTConfig(), about="encoder, base size, masked tokens"),
        "t5": Entry(config=t5, about="encoder and decoder, base size (needs transformers)"),
        "vit-l16": Entry(config=ViTConfig(num_layers=24, width=1024, num_heads=16, patch=16), about="image classifier"),
        "resnet50": Entry(config=ResNetConfig(), about="image classifier with batch norm"),
    }


def names() -> tuple[str, ...]:
    """Names that :func:`build` knows."""
    return tuple(_entries())


def needs_library(name: str) -> bool:
    """Whether the built-in model ``name`` needs transformers and transformers is not installed."""
    return isinstance(entry(name).config, Mapping) and importlib.util.find_spec("transformers") is None


def entry(name: str) -> Entry:
    """The built-in model ``name``.

    Raises:
        UsageError: there is none of that name.
    """
    entries = _entries()
    if name not in entries:
        near = difflib.get_close_matches(name, entries, n=1)
        advice = f"did you mean {near[0]!r}? " if near else ""
        raise UsageError(f"{name!r} is no built-in model; {advice}they are {', '.join(entries)}")
    return entries[name]


def build(
    name: str, *, batch: int, sequence: int | None = None, device: str = "meta", dtype: torch.dtype | None = None
) -> Call:
    """A built-in model and a call of it that returns a training loss.

    Args:
        name: one of :func:`names`.
        batch: rows of the global batch.
        sequence: tokens in a row; None takes the longest that the model is made for.  Image models take none.
        device: where parameters and inputs are made; on "meta" they have no data and cost no memory.
        dtype: of the parameters; None takes the one that the model is usually trained in.

    Returns:
        ``(model, args, kwargs, loss_fn)``, with ``loss_fn`` None: the models return their loss.

    Raises:
        UsageError: an unknown name, or a batch or sequence that the model cannot take.

    >>> model, args, kwargs, loss_fn = build("gpt2", batch=4, sequence=128)
    >>> sum(p.numel() for p in model.parameters()), args[0].shape
    (124439808, torch.Size([4, 128]))
    """
    found = entry(name)
    if batch < 1:
        raise UsageError(f"a batch of {batch} rows is not possible; use at least 1")
    length = _checked_length(name, found, sequence)
    config = found.config
    if isinstance(config, Mapping):
        return from_config(config, batch=batch, sequence=length, device=device, dtype=dtype or found.dtype)
    with torch.device(device):
        if isinstance(config, ViTConfig | ResNetConfig):
            model: nn.Module = ViT(config) if isinstance(config, ViTConfig) else ResNet(config)
            images = torch.randn(batch, 3, config.image, config.image, dtype=dtype or found.dtype)
            args: tuple[torch.Tensor, ...] = (images, torch.randint(config.num_classes, (batch,)))
        else:
            ids, labels = (torch.randint(config.vocabulary, (batch, length)) for _ in range(2))
            args = (ids, labels)
            if isinstance(config, BERTConfig):
                model, args = BERT(config), (ids, torch.zeros_like(ids), labels)
            else:
                model = GPT(config) if isinstance(config, GPTConfig) else Llama(config)
    return model.to(dtype or found.dtype).train(), args, {}, None


def _checked_length(name: str, found: Entry, sequence: int | None) -> int:
    longest = found.sequence
    if longest is None:
        if sequence is not None:
            raise UsageError(f"{name} takes images: leave the sequence out")
        return 0
    if sequence is not None and not 1 <= sequence <= longest:
        raise UsageError(f"{name} cannot take a sequence of {sequence}; use 1 to {longest}")
    return longest if sequence is None else sequence
