"""Writes tiny folders of the `speculators` package with their own draft logits, which tests compare with ours.

Run where that package is installed (it is no dependency): `python tests/data/speculators/make.py`. Weights and hidden
states are random; beside each folder lies a file with the inputs and the logits that the package computes.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

FOLDER = Path(__file__).parent
VOCAB, DRAFT_VOCAB, HIDDEN, LENGTH, DEPTHS, BLOCK, ANCHOR = 512, 96, 32, 24, [1, 2, 3], 5, 14
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
}


def speculators_config(algorithm: str, tokens: int) -> SpeculatorsConfig:
    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=tokens)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path="tiny", architectures=["LlamaForCausalLM"]),
    )


def randomise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for value in model.parameters():
        noise = torch.randn(value.shape, generator=generator)
        value.data = 1.0 + 0.2 * noise if value.ndim == 1 and value.shape[0] > 1 else 0.2 * noise
    if model.t2d is not None:
        chosen = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
        t2d = torch.zeros(VOCAB, dtype=torch.bool)
        t2d[chosen] = True
        model.load_vocab_mappings(t2d, chosen - torch.arange(DRAFT_VOCAB))


def inputs(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden": torch.randn(LENGTH, len(DEPTHS) * HIDDEN, generator=generator),
        "tokens": torch.randint(0, VOCAB, (LENGTH,), generator=generator),
    }


def write(name: str, model: torch.nn.Module, reference: dict[str, torch.Tensor]) -> None:
    model.save_pretrained(FOLDER / name)
    for extra in ("generation_config.json", "config.py"):
        (FOLDER / name / extra).unlink(missing_ok=True)
    save_file({key: value.contiguous() for key, value in reference.items()}, FOLDER / f"{name}.reference.safetensors")


def eagle(name: str, seed: int, layer: type, **options: bool) -> None:
    """Row t of `hidden` beside token t + 1: three rounds, each fed the text's own next token."""
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer(**SHAPE, num_hidden_layers=1),
        draft_vocab_size=DRAFT_VOCAB,
        eagle_aux_hidden_state_layer_ids=DEPTHS,
        speculators_config=speculators_config("eagle3", 3),
        **options,
    )
    model = Eagle3DraftModel(config).eval()
    randomise(model, seed)
    made, rounds = inputs(seed), []
    hook = model.lm_head.register_forward_hook(lambda _, __, out: rounds.append(out[0].detach()))
    shifted = made["tokens"][1:][None]
    with torch.no_grad():
        model(made["hidden"][None, :-1], shifted, torch.zeros_like(shifted), ttt_steps=3)
    hook.remove()
    write(name, model, made | {"logits": torch.stack(rounds)})


def block(name: str, seed: int, kind: type, config_kind: type, sliding: bool, **options: object) -> None:
    layer = Qwen3Config(
        **SHAPE,
        num_hidden_layers=2,
        use_sliding_window=sliding,
        sliding_window=LENGTH if sliding else None,
        layer_types=["sliding_attention" if sliding else "full_attention"] * 2,
    )
    config = config_kind(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCAB,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=DEPTHS,
        mask_token_id=VOCAB - 1,
        speculators_config=speculators_config(name, BLOCK),
        **options,
    )
    model = kind(config).eval()
    randomise(model, seed)
    made = inputs(seed) | {"embed": model.embed_tokens.weight.data}  # folders of this kind leave it out
    loss_mask = torch.zeros(1, LENGTH)
    loss_mask[0, ANCHOR] = 1
    tokens = made["tokens"][None]
    last = torch.zeros(1, LENGTH, HIDDEN)
    with torch.no_grad():
        hidden, logits, *_ = model._backbone_forward(
            made["hidden"][None], tokens, loss_mask, last, torch.zeros_like(tokens), max_anchors=1
        )
        made |= {"logits": logits[0], "anchor": torch.tensor([ANCHOR])}
        if getattr(model, "markov_head", None) is not None:
            before = tokens[0, ANCHOR : ANCHOR + BLOCK][None]
            previous = model.markov_head.prev_embeddings(before)
            made["logits"] = (logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden))[0]
            made["confidence"] = model.confidence_head(torch.cat((hidden, previous), -1))[0].sigmoid()
    write(name, model, made)


if __name__ == "__main__":
    eagle("eagle3", 1, LlamaConfig)
    eagle("eagle31", 2, Qwen3Config, norm_before_residual=True, fc_norm=True, norm_output=True)
    block("dflash", 3, DFlashDraftModel, DFlashSpeculatorConfig, sliding=False)
    block("dspark", 4, DSparkDraftModel, DSparkSpeculatorConfig, sliding=True, markov_rank=8)
