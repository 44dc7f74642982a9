"""A Megatron-Core model (one rank, bfloat16, local layers) beside transformers with its weights; one line of JSON.

Its parallel state belongs to the process, hence a process of its own: python megatron_far_end.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from relax_rt.roles.models.parallel import Sizes
from relax_rt.roles.models.shape import shape_of
from relax_rt.roles.training.megatron.layout import ModelDivision, naming_of
from relax_rt.roles.training.megatron.resharding import check_shards, extract_part, place_part, plan_buckets

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
}
ROPE = 1e6


def megatron_model() -> Any:
    """One rank's GPTModel on the device."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(1, 1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=CONFIG["num_hidden_layers"],
        hidden_size=CONFIG["hidden_size"],
        num_attention_heads=CONFIG["num_attention_heads"],
        num_query_groups=CONFIG["num_key_value_heads"],
        kv_channels=CONFIG["head_dim"],
        ffn_hidden_size=CONFIG["intermediate_size"],
        normalization="RMSNorm",
        layernorm_epsilon=CONFIG["rms_norm_eps"],
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        qk_layernorm=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    return (
        GPTModel(
            config,
            spec,
            vocab_size=CONFIG["vocab_size"],
            max_sequence_length=CONFIG["max_position_embeddings"],
            position_embedding_type="rope",
            rotary_base=int(ROPE),
            share_embeddings_and_output_weights=False,
        )
        .cuda()
        .bfloat16()
        .eval()
    )


def resharded(model: Any) -> dict[str, torch.Tensor]:
    """Its weights by their Hugging Face names."""
    shards = [dict(model.named_parameters())]
    division = ModelDivision(sizes=Sizes(world=1), naming=naming_of(shards[0].keys()))
    plan = plan_buckets(shape_of(CONFIG), division, dtype="bfloat16")
    check_shards(plan, 0, shards)
    into = bytearray(plan.layout.nbytes)
    for bucket in plan.buckets:
        place_part(plan, bucket, 0, extract_part(plan, bucket, 0, shards), memoryview(into))
    flat = torch.frombuffer(into, dtype=torch.uint8)
    return {
        e.name: flat[e.offset : e.offset + e.nbytes].view(torch.bfloat16).view(e.shape) for e in plan.layout.entries
    }


def main() -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", init_method=f"file://{Path(sys.argv[1]) / 'store'}", rank=0, world_size=1)
    torch.cuda.set_device(0)
    model = megatron_model()
    values = {k: v for k, v in CONFIG.items() if k != "model_type"}
    config = transformers.Qwen3Config(**values, rope_parameters={"rope_type": "default", "rope_theta": ROPE})
    other = transformers.Qwen3ForCausalLM(config)
    missing, unexpected = other.load_state_dict(resharded(model), strict=False)
    other = other.bfloat16().cuda().eval()
    ids = torch.randint(
        0, CONFIG["vocab_size"], (2, 64), device="cuda", generator=torch.Generator("cuda").manual_seed(1)
    )
    positions = torch.arange(64, device="cuda")[None].expand(2, -1)
    mask = torch.triu(torch.ones(64, 64, dtype=torch.bool, device="cuda"), 1)[None, None]
    with torch.no_grad():
        got = torch.log_softmax(model(ids, positions, mask).float(), -1)
        wanted = torch.log_softmax(other(ids).logits.float(), -1)
        exact = torch.log_softmax(other.float()(ids).logits, -1)
    result = {
        "missing": missing,
        "unexpected": unexpected,
        "megatron": float((got - exact).abs().max()),
        "torch": float((wanted - exact).abs().max()),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
