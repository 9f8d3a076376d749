"""Models of the transformers library, unchanged."""

from __future__ import annotations

import pytest
import torch

from autopar.capture import capture, rebuild_result
from autopar.cost_models.errors import CaptureError
from tests.capture.replay import eager, replay
from tests.capture.zoo import Case

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def gpt2(**options):
    config = transformers.GPT2Config(
        vocab_size=61, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, **options
    )
    tokens = torch.randint(0, 61, (2, 8))
    return Case(model=transformers.GPT2LMHeadModel(config).train(), kwargs={"input_ids": tokens, "labels": tokens})


def llama():
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    tokens = torch.randint(3, 61, (2, 8))
    mask = torch.ones_like(tokens)
    mask[1, 5:] = 0
    kwargs = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
    return Case(model=transformers.LlamaForCausalLM(config).train(), kwargs=kwargs)


def t5():
    config = transformers.T5Config(
        vocab_size=61, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    kwargs = {"input_ids": torch.randint(1, 61, (2, 6)), "labels": torch.randint(1, 61, (2, 4))}
    return Case(model=transformers.T5ForConditionalGeneration(config).train(), kwargs=kwargs)


@pytest.mark.parametrize("make", [lambda: gpt2(use_cache=False), llama, t5], ids=["gpt2", "llama", "t5"])
def test_a_language_model_equals_eager(make):
    case = make()
    step = capture(case.model, (), case.kwargs)
    assert step.loss_leaf == 0
    got, outputs = replay(step, case)
    want = eager(case, 0)
    torch.testing.assert_close(got.results[0], want.results[0])
    assert got.gradients.keys() == want.gradients.keys()
    for name, gradient in want.gradients.items():
        torch.testing.assert_close(got.gradients[name], gradient, rtol=1e-4, atol=1e-6)
    result = rebuild_result(step, outputs)
    assert isinstance(result, transformers.utils.ModelOutput)
    torch.testing.assert_close(result.loss, want.results[0])


def test_a_cache_in_the_result_is_refused_in_one_line():
    case = gpt2()
    with pytest.raises(CaptureError, match=r"object of type DynamicCache.*use_cache=False") as caught:
        capture(case.model, (), case.kwargs)
    assert "\n" not in str(caught.value)


def test_a_cache_that_the_loss_leaves_out_does_no_harm():
    case = gpt2()
    assert capture(case.model, (), case.kwargs, loss_fn=lambda out: out.loss).loss_leaf == 0


def test_gradient_checkpointing_lists_the_layers():
    case = gpt2(use_cache=False)
    case.model.gradient_checkpointing_enable()
    step = capture(case.model, (), case.kwargs)
    assert step.checkpoints == ("transformer.h.0", "transformer.h.1")
    assert step.repeated == (("transformer.h.0", "transformer.h.1"),)
