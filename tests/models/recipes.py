"""Small models of many architectures, each with one training call: what the table of architectures is made from.

Sizes are small and, where an architecture allows it, odd: vocabularies, sequences, images that two ranks cannot halve.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

ROWS, LENGTH, WORDS, CLASSES = 4, 7, 61, 3


@dataclass(frozen=True, kw_only=True)
class Call:
    """A model in training mode and one call of it.  Without ``loss_fn`` the model returns its loss."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss_fn: Callable[[Any], torch.Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One architecture: its name, how to build it, and what is expected of it.

    Attributes:
        name: as the table shows it.
        make: builds the model and its call.
        standard: a transformer whose weights tensor parallelism is made for: most of its work has to be split.
        refused: part of the message of the error with which it has to be refused, or "".
    """

    name: str
    make: Callable[[], Call]
    standard: bool = False
    refused: str = ""


def tokens(rows: int = ROWS, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, WORDS, (rows, length))


def causal() -> dict[str, Any]:
    """Token ids, a mask that leaves out the end of one row, and labels."""
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def masked() -> dict[str, Any]:
    call = causal()
    return call | {"labels": torch.where(torch.rand(call["labels"].shape) < 0.5, call["labels"], -100)}


def translated() -> dict[str, Any]:
    return {"input_ids": tokens(), "labels": tokens(length=5)}


def pictured(size: int = 12) -> dict[str, Any]:
    return {"pixel_values": torch.randn(ROWS, 3, size, size), "labels": torch.randint(CLASSES, (ROWS,))}


def of_transformers(
    config: str, model: str, call: Callable[[], dict[str, Any]], loss_fn: Callable[[Any], torch.Tensor] | None = None,
    **fields: Any,  # noqa: ANN401 - what a configuration takes
) -> Callable[[], Call]:  # fmt: skip
    """A maker of a model of the library from its configuration, with every dropout of the configuration at 0."""

    def make() -> Call:
        library: Any = importlib.import_module("transformers")
        made = getattr(library, config)(**fields)
        parts = [made, *(v for v in vars(made).values() if isinstance(v, library.PretrainedConfig))]
        for part in parts:
            for name, value in vars(part).items():
                if isinstance(value, float) and ("drop" in name or "pdrop" in name) and name not in fields:
                    setattr(part, name, 0.0)
        if getattr(made, "use_cache", False):
            made.use_cache = False
        return Call(model=getattr(library, model)(made).train(), kwargs=call(), loss_fn=loss_fn)

    return make


def in_double(make: Callable[[], Call]) -> Callable[[], Call]:
    """The same model and call in float64."""

    def double() -> Call:
        call = make()
        kwargs = {k: v.double() if v.is_floating_point() else v for k, v in call.kwargs.items()}
        return replace(call, model=call.model.double(), kwargs=kwargs)

    return double


WIDTH = {
    "vocab_size": WORDS, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = WIDTH | {"num_key_value_heads": 2}
HEADS = GROUPED | {"head_dim": 6}
ENDS = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SEQ2SEQ = ENDS | {
    "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "max_position_embeddings": 16, "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}  # fmt: skip
IMAGE = {
    "image_size": 12, "patch_size": 4, "num_channels": 3, "hidden_size": 24, "intermediate_size": 40,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": CLASSES,
}  # fmt: skip
BERT = WIDTH | {"type_vocab_size": 2}


def clip() -> dict[str, Any]:
    return {
        "input_ids": tokens(), "pixel_values": torch.randn(ROWS, 3, 12, 12), "return_loss": True,
        "attention_mask": torch.ones(ROWS, LENGTH).long(),
    }  # fmt: skip


def heard() -> dict[str, Any]:
    return {"input_features": torch.randn(ROWS, 9, 22), "labels": tokens(length=5)}


def waved() -> dict[str, Any]:
    return {"input_values": torch.randn(ROWS, 400), "labels": tokens(length=5)}


def logits_loss(out: Any) -> torch.Tensor:  # noqa: ANN401 - any output of the library
    return out.logits.square().mean()


SOUND = ENDS | {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "conv_dim": (8, 12),
    "conv_stride": (5, 4), "conv_kernel": (7, 5), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0,
}  # fmt: skip
CONVOLUTIONS = {
    "num_channels": 3, "hidden_sizes": [8, 12, 16], "depths": [1, 2, 1], "num_labels": CLASSES,
}  # fmt: skip

TRANSFORMERS = (
    Recipe(name="GPT-2", standard=True, make=of_transformers(
        "GPT2Config", "GPT2LMHeadModel", causal, **ENDS, n_positions=16, n_embd=24, n_layer=2, n_head=4)),
    Recipe(name="GPT-2, dropout 0.1", standard=True, make=of_transformers(
        "GPT2Config", "GPT2LMHeadModel", causal, **ENDS, n_positions=16, n_embd=24, n_layer=2, n_head=4,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)),
    Recipe(name="GPT-Neo", standard=True, make=of_transformers(
        "GPTNeoConfig", "GPTNeoForCausalLM", causal, **ENDS, hidden_size=24, num_layers=2, num_heads=4,
        intermediate_size=40,
        attention_types=[[["global", "local"], 1]], window_size=4, max_position_embeddings=16)),
    Recipe(name="GPT-NeoX", standard=True, make=of_transformers(
        "GPTNeoXConfig", "GPTNeoXForCausalLM", causal, **WIDTH)),
    Recipe(name="GPT-J", standard=True, make=of_transformers(
        "GPTJConfig", "GPTJForCausalLM", causal, **ENDS, n_positions=16, n_embd=24, n_layer=2, n_head=4, rotary_dim=2)),
    Recipe(name="GPT-BigCode", standard=True, make=of_transformers(
        "GPTBigCodeConfig", "GPTBigCodeForCausalLM", causal, **ENDS, n_positions=16, n_embd=24, n_layer=2, n_head=4)),
    Recipe(name="OPT", standard=True, make=of_transformers(
        "OPTConfig", "OPTForCausalLM", causal, **ENDS, hidden_size=24, ffn_dim=40, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=16, word_embed_proj_dim=24)),
    Recipe(name="Bloom", standard=True, make=of_transformers(
        "BloomConfig", "BloomForCausalLM", causal, **ENDS, hidden_size=24, n_layer=2, n_head=4)),
    Recipe(name="MPT", standard=True, make=of_transformers(
        "MptConfig", "MptForCausalLM", causal, vocab_size=WORDS, d_model=24, n_heads=4, n_layers=2, max_seq_len=16)),
    Recipe(name="Falcon", standard=True, make=of_transformers(
        "FalconConfig", "FalconForCausalLM", causal, **ENDS, hidden_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_kv_heads=2, new_decoder_architecture=True)),
    Recipe(name="Llama", standard=True, make=of_transformers("LlamaConfig", "LlamaForCausalLM", causal, **GROUPED)),
    Recipe(name="Llama, 3 heads", make=of_transformers(
        "LlamaConfig", "LlamaForCausalLM", causal,
        **(GROUPED | {"num_attention_heads": 3, "num_key_value_heads": 3}))),
    Recipe(name="Mistral", standard=True, make=of_transformers(
        "MistralConfig", "MistralForCausalLM", causal, **GROUPED, sliding_window=4)),
    Recipe(name="Qwen2", standard=True, make=of_transformers("Qwen2Config", "Qwen2ForCausalLM", causal, **GROUPED)),
    Recipe(name="Qwen3", standard=True, make=of_transformers("Qwen3Config", "Qwen3ForCausalLM", causal, **HEADS)),
    Recipe(name="Gemma", standard=True, make=of_transformers("GemmaConfig", "GemmaForCausalLM", causal, **HEADS)),
    Recipe(name="Gemma 2", standard=True, make=of_transformers(
        "Gemma2Config", "Gemma2ForCausalLM", causal, **HEADS, query_pre_attn_scalar=6, sliding_window=4)),
    Recipe(name="Phi", standard=True, make=of_transformers(
        "PhiConfig", "PhiForCausalLM", causal, **(WIDTH | {"hidden_size": 32}))),
    Recipe(name="Phi-3", standard=True, make=of_transformers("Phi3Config", "Phi3ForCausalLM", causal, **GROUPED)),
    Recipe(name="StableLM", standard=True, make=of_transformers(
        "StableLmConfig", "StableLmForCausalLM", causal, **GROUPED)),
    Recipe(name="StarCoder2", standard=True, make=of_transformers(
        "Starcoder2Config", "Starcoder2ForCausalLM", causal, **GROUPED)),
    Recipe(name="OLMo 2", standard=True, make=of_transformers("Olmo2Config", "Olmo2ForCausalLM", causal, **GROUPED)),
    Recipe(name="Cohere", standard=True, make=of_transformers("CohereConfig", "CohereForCausalLM", causal, **GROUPED)),
    Recipe(name="Mixtral", make=of_transformers(
        "MixtralConfig", "MixtralForCausalLM", causal, **GROUPED, num_local_experts=4, num_experts_per_tok=2)),
    Recipe(name="Mixtral, batched experts", make=of_transformers(
        "MixtralConfig", "MixtralForCausalLM", causal, **GROUPED, num_local_experts=4, num_experts_per_tok=2,
        experts_implementation="batched_mm")),
    Recipe(name="Mamba", make=of_transformers(
        "MambaConfig", "MambaForCausalLM", causal, **ENDS, hidden_size=24, state_size=4, num_hidden_layers=2,
        time_step_rank=3)),
    Recipe(name="BERT", standard=True, make=of_transformers("BertConfig", "BertForMaskedLM", masked, **BERT)),
    Recipe(name="RoBERTa", standard=True, make=of_transformers("RobertaConfig", "RobertaForMaskedLM", masked, **BERT)),
    Recipe(name="DistilBERT", standard=True, make=of_transformers(
        "DistilBertConfig", "DistilBertForMaskedLM", masked, vocab_size=WORDS, max_position_embeddings=16, dim=24,
        hidden_dim=40, n_layers=2, n_heads=4)),
    Recipe(name="ELECTRA", standard=True, make=of_transformers(
        "ElectraConfig", "ElectraForMaskedLM", masked, **BERT, embedding_size=16)),
    Recipe(name="ALBERT", standard=True, make=of_transformers(
        "AlbertConfig", "AlbertForMaskedLM", masked, **BERT, embedding_size=16)),
    Recipe(name="DeBERTa", make=of_transformers(
        "DebertaConfig", "DebertaForMaskedLM", masked, **BERT, relative_attention=True, pos_att_type=["c2p", "p2c"])),
    Recipe(name="DeBERTa-v2", make=of_transformers(
        "DebertaV2Config", "DebertaV2ForMaskedLM", masked, **BERT, relative_attention=True, pos_att_type=["c2p",
        "p2c"])),
    Recipe(name="ModernBERT", make=of_transformers(
        "ModernBertConfig", "ModernBertForMaskedLM", masked, **WIDTH, local_attention=4,
        cls_token_id=1, sep_token_id=2)),
    Recipe(name="FNet", make=of_transformers("FNetConfig", "FNetForMaskedLM", lambda: {
        k: v for k, v in masked().items() if k != "attention_mask"},
        **{k: v for k, v in BERT.items() if k != "num_attention_heads"})),
    Recipe(name="T5", standard=True, make=of_transformers(
        "T5Config", "T5ForConditionalGeneration", translated, vocab_size=WORDS, d_model=24, d_kv=6, d_ff=40,
        num_layers=2,
        num_heads=4, decoder_start_token_id=0, pad_token_id=0)),
    Recipe(name="T5, gated", standard=True, make=of_transformers(
        "T5Config", "T5ForConditionalGeneration", translated, vocab_size=WORDS, d_model=24, d_kv=6, d_ff=40,
        num_layers=2,
        num_heads=4, decoder_start_token_id=0, pad_token_id=0, feed_forward_proj="gated-gelu",
        tie_word_embeddings=False)),
    Recipe(name="BART", standard=True, make=of_transformers(
        "BartConfig", "BartForConditionalGeneration", translated, **SEQ2SEQ)),
    Recipe(name="mBART", standard=True, make=of_transformers(
        "MBartConfig", "MBartForConditionalGeneration", translated, **SEQ2SEQ)),
    Recipe(name="Pegasus", standard=True, make=of_transformers(
        "PegasusConfig", "PegasusForConditionalGeneration", translated, **SEQ2SEQ)),
    Recipe(name="Marian", standard=True, make=of_transformers("MarianConfig", "MarianMTModel", translated, **SEQ2SEQ)),
    Recipe(name="Whisper", standard=True, make=of_transformers(
        "WhisperConfig", "WhisperForConditionalGeneration", heard, vocab_size=WORDS, num_mel_bins=9, d_model=24,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=40,
        decoder_ffn_dim=40, max_source_positions=11, max_target_positions=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=2, suppress_tokens=None, begin_suppress_tokens=None)),
    Recipe(name="Wav2Vec2", standard=True, make=of_transformers(
        "Wav2Vec2Config", "Wav2Vec2ForCTC", lambda: {"input_values": waved()["input_values"]}, logits_loss, **SOUND)),
    Recipe(name="Wav2Vec2 with labels", refused="labels.max() >= self.config.vocab_size", make=of_transformers(
        "Wav2Vec2Config", "Wav2Vec2ForCTC", waved, **SOUND)),
    Recipe(name="ViT", standard=True, make=of_transformers(
        "ViTConfig", "ViTForImageClassification", pictured, **IMAGE)),
    Recipe(name="DeiT", standard=True, make=of_transformers(
        "DeiTConfig", "DeiTForImageClassification", pictured, **IMAGE)),
    Recipe(name="BEiT", make=of_transformers("BeitConfig", "BeitForImageClassification", pictured, **IMAGE)),
    Recipe(name="DINOv2", standard=True, make=of_transformers(
        "Dinov2Config", "Dinov2ForImageClassification", pictured, **IMAGE)),
    Recipe(name="Swin", make=of_transformers(
        "SwinConfig", "SwinForImageClassification", lambda: pictured(16), image_size=16, patch_size=2, embed_dim=12,
        depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=CLASSES)),
    Recipe(name="ConvNeXt", make=of_transformers(
        "ConvNextConfig", "ConvNextForImageClassification", lambda: pictured(20), **(CONVOLUTIONS | {
            "patch_size": 4, "num_stages": 3}))),
    Recipe(name="ResNet", make=of_transformers(
        "ResNetConfig", "ResNetForImageClassification", lambda: pictured(21), **CONVOLUTIONS, embedding_size=8)),
    Recipe(name="RegNet", make=of_transformers(
        "RegNetConfig", "RegNetForImageClassification", lambda: pictured(21), **CONVOLUTIONS, embedding_size=8,
        groups_width=4)),
    # The means of its norms cancel to nearly nothing: their rounding in float32 is all that they are.
    Recipe(name="MobileNet v2, float64", make=in_double(of_transformers(
        "MobileNetV2Config", "MobileNetV2ForImageClassification", lambda: pictured(33), image_size=33,
        depth_multiplier=0.25, num_labels=CLASSES))),
    Recipe(name="SegFormer", make=of_transformers(
        "SegformerConfig", "SegformerForImageClassification", lambda: pictured(32), num_encoder_blocks=2, depths=[1, 1],
        sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[2, 4],
        mlp_ratios=[2, 2], num_labels=CLASSES)),
    Recipe(name="CLIP", standard=True, make=of_transformers(
        "CLIPConfig", "CLIPModel", clip, projection_dim=20,
        text_config={**WIDTH, "eos_token_id": 2}, vision_config={k: v for k, v in IMAGE.items() if k != "num_labels"})),
)  # fmt: skip


class UNet(nn.Module):
    """Two levels down and up again, with a skip connection and group norms."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter = self._double(3, width)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = self._double(2 * width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.leave = nn.Sequential(self._double(2 * width, width), nn.Conv2d(width, CLASSES, 1))

    @staticmethod
    def _double(inner: int, outer: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inner, outer, 3, padding=1),
            nn.GroupNorm(2, outer),
            nn.SiLU(),
            nn.Conv2d(outer, outer, 3, padding=1),
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        high = self.enter(x)
        low = self.middle(self.down(high).relu())
        joined = torch.cat([high, self.up(low)], 1)
        return nn.functional.cross_entropy(self.leave(joined), labels)


class RecurrentLanguageModel(nn.Module):
    """Embedding, two layers of LSTM, vocabulary."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embed(ids[:, :-1]))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), ids[:, 1:].flatten())


class Residual(nn.Module):
    """Two convolutions with batch norms around a skip connection."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outer)
        self.second = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outer)
        self.skip = nn.Sequential(nn.Conv2d(inner, outer, 1, stride=stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = self.norm1(self.first(x)).relu()
        return (self.norm2(self.second(inside)) + self.skip(x)).relu()


class Encoder(nn.Module):
    """``nn.TransformerEncoder`` over embedded tokens, with padding masked."""

    def __init__(self, *, norm_first: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 24)
        layer = nn.TransformerEncoderLayer(24, 4, 40, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(24, WORDS)

    def forward(self, ids: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(self.embed(ids), src_key_padding_mask=padding)
        return nn.functional.cross_entropy(self.head(hidden).transpose(1, 2), ids)


class Attention(nn.Module):
    """``nn.MultiheadAttention`` with sequence first, other widths of key and value, and its weights returned."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 4, kdim=10, vdim=14)
        self.out = nn.Linear(24, CLASSES)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out, weights = self.attention(query, key, value)
        return self.out(out).square().mean() + weights.square().sum()


def class_loss(labels: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda logits: nn.functional.cross_entropy(logits, labels)


def unet() -> Call:
    return Call(model=UNet(), args=(torch.randn(ROWS, 3, 10, 14), torch.randint(CLASSES, (ROWS, 10, 14))))


def lstm() -> Call:
    return Call(model=RecurrentLanguageModel(), args=(tokens(),))


def residual_net() -> Call:
    blocks = nn.Sequential(Residual(3, 8, 1), Residual(8, 16, 2))
    model = nn.Sequential(blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))
    return Call(model=model, args=(torch.randn(ROWS, 3, 11, 9),), loss_fn=class_loss(torch.randint(CLASSES, (ROWS,))))


def encoder(*, norm_first: bool) -> Callable[[], Call]:
    def make() -> Call:
        padding = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
        padding[2, 4:] = True
        return Call(model=Encoder(norm_first=norm_first), args=(tokens(), padding))

    return make


def attention() -> Call:
    rows = (torch.randn(LENGTH, ROWS, 24), torch.randn(5, ROWS, 10), torch.randn(5, ROWS, 14))
    return Call(model=Attention(), args=rows)


PLAIN = (
    Recipe(name="U-Net (torch)", make=unet),
    Recipe(name="nn.LSTM language model", make=lstm),
    Recipe(name="residual network (torch)", make=residual_net),
    Recipe(name="nn.TransformerEncoder", standard=True, make=encoder(norm_first=False)),
    Recipe(name="nn.TransformerEncoder, norm first", standard=True, make=encoder(norm_first=True)),
    Recipe(name="nn.MultiheadAttention", make=attention),
)

RECIPES = TRANSFORMERS + PLAIN
