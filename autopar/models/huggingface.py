"""Models from the configurations of the transformers library, built without weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from autopar.cost_models.errors import UsageError

_IMAGE_FIELDS = ("image_size", "num_channels")


def from_config(
    fields: Mapping[str, Any], *, batch: int, sequence: int | None, device: str, dtype: torch.dtype | None = None
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], Callable[..., Any] | None]:
    """The model of a ``config.json`` and a call of it with labels, so that it returns its loss.

    Args:
        fields: what the file holds; ``model_type`` is needed, ``architectures`` names the class (else a causal
            language model is built).
        batch: rows of the global batch.
        sequence: tokens in a row; None takes what the configuration allows.
        device: where parameters and inputs are made.
        dtype: of the parameters; None takes the configuration's.

    Raises:
        UsageError: transformers is not installed, or does not know or cannot build the model.
    """
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError("this model needs transformers: pip install 'autopar[hf]'") from error
    kind = fields.get("model_type")
    if not isinstance(kind, str):
        raise UsageError("the configuration has no model_type; is it a config.json of transformers?")
    try:
        config = transformers.AutoConfig.for_model(kind, **{k: v for k, v in fields.items() if k != "model_type"})
        config.use_cache = False
        with torch.device(device):
            model = _class_of(transformers, fields)._from_config(config)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"transformers cannot build a {kind!r} from this configuration: {error}") from error
    wanted = dtype or getattr(config, "dtype", None) or torch.float32
    model = model.to(wanted).train()
    return model, (), _call_of(config, batch=batch, sequence=sequence, device=device, dtype=wanted), None


def _class_of(transformers: Any, fields: Mapping[str, Any]) -> Any:  # noqa: ANN401 - an optional library's classes
    names = fields.get("architectures") or ()
    found = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    return found or transformers.AutoModelForCausalLM


def _call_of(
    config: Any,  # noqa: ANN401 - an optional library's configuration
    *,
    batch: int,
    sequence: int | None,
    device: str,
    dtype: torch.dtype,
) -> dict[str, Any]:
    if all(hasattr(config, name) for name in _IMAGE_FIELDS) and not hasattr(config, "vocab_size"):
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        images = torch.randn(batch, config.num_channels, height, width, device=device, dtype=dtype)
        labels = torch.randint(getattr(config, "num_labels", 2), (batch,), device=device)
        return {"pixel_values": images, "labels": labels}
    longest = next(
        (int(n) for name in ("max_position_embeddings", "n_positions") if (n := getattr(config, name, None))), 1024
    )
    shape = (batch, sequence or longest)
    ids = torch.randint(config.vocab_size, shape, device=device)
    return {"input_ids": ids, "labels": torch.randint(config.vocab_size, shape, device=device)}
