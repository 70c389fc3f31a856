from __future__ import annotations

import torch
import transformers
from transformers.models.llama import modeling_llama

from lowtide.models.rope import rope_tables, rotate

CPU = torch.device("cpu")


def test_tables_and_rotation_equal_transformers() -> None:
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0}
    )
    length, head_size = 37, 16
    query = torch.randn(2, 4, length, head_size)
    key = torch.randn(2, 2, length, head_size)
    their_cos, their_sin = modeling_llama.LlamaRotaryEmbedding(config)(query, torch.arange(length)[None])
    cos, sin = rope_tables(length, head_size, theta=500_000.0, device=CPU)
    torch.testing.assert_close(cos, their_cos[0])
    torch.testing.assert_close(sin, their_sin[0])
    their_query, their_key = modeling_llama.apply_rotary_pos_emb(query, key, their_cos, their_sin)
    torch.testing.assert_close(rotate(query, cos, sin), their_query)
    torch.testing.assert_close(rotate(key, cos, sin), their_key)


def test_scores_depend_on_distance_only() -> None:
    # The property the method is named for: moving query and key together leaves their product alone.
    query, key = torch.randn(16), torch.randn(16)
    cos, sin = rope_tables(40, 16, theta=10_000.0, device=CPU)
    queries = rotate(query.expand(1, 1, 40, 16), cos, sin)[0, 0]
    keys = rotate(key.expand(1, 1, 40, 16), cos, sin)[0, 0]
    torch.testing.assert_close(queries[9] @ keys[4], queries[35] @ keys[30], rtol=1e-4, atol=1e-5)


def test_low_precision_is_not_promoted() -> None:
    cos, sin = rope_tables(8, 16, theta=10_000.0, device=CPU)
    assert rotate(torch.randn(1, 1, 8, 16, dtype=torch.bfloat16), cos, sin).dtype == torch.bfloat16
