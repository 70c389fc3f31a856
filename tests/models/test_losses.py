from __future__ import annotations

import pytest
import torch

from lowtide.models.losses import next_token_loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_the_mean_over_next_tokens_that_count(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 5, 11).to(dtype)
    labels = torch.randint(11, (2, 5))
    labels[0, 2] = -100
    log_p = logits.float().log_softmax(-1)
    picked = [log_p[b, t, labels[b, t + 1]] for b in range(2) for t in range(4) if labels[b, t + 1] != -100]
    assert len(picked) == 7
    loss = next_token_loss(logits, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, -torch.stack(picked).mean())


def test_first_label_and_last_logits_do_not_matter() -> None:
    logits, labels = torch.randn(1, 4, 7), torch.randint(7, (1, 4))
    other_logits, other_labels = logits.clone(), labels.clone()
    other_logits[:, -1] += 5.0
    other_labels[:, 0] = (labels[:, 0] + 1) % 7
    torch.testing.assert_close(next_token_loss(logits, labels), next_token_loss(other_logits, other_labels))
