from __future__ import annotations

from dataclasses import replace

from lowtide.tracing.remarks import foreach_copies, logits_copies, remarks
from lowtide.tracing.step_trace import Category, Phase
from lowtide.units import MiB
from tests.tracing.samples import TraceBuilder, tiny_trace, transformer_trace


def test_copies_of_the_logits_are_counted_at_the_peak() -> None:
    trace = transformer_trace(layers=2, width=256, tokens=1024, vocab=50257)
    copies = logits_copies(trace, trace.peak_event)
    # The bf16 logits, the fp32 log-softmax, and the gradient that its backward makes.
    assert copies is not None
    assert (copies.count, copies.number, copies.shape) == (3, "three", (1024, 50257))
    assert abs(copies.bytes - 1024 * 50257 * (2 + 4 + 4)) < 3 * 512
    assert copies.dtypes == ("bfloat16", "float32")
    assert remarks(trace)[0].startswith("Three tensors have the size of the logits [1024, 50257] at the peak")


def test_slightly_shorter_copies_count_and_other_tensors_do_not() -> None:
    builder = TraceBuilder()
    builder.allocate(MiB, Category.WEIGHTS, shape=(128, 1000))
    builder.enter(Phase.LOSS)
    builder.op("aten.mm")
    builder.allocate(MiB, Category.ACTIVATIONS, shape=(4, 32, 1000))
    builder.op("aten.clone")
    builder.allocate(MiB, Category.ACTIVATIONS, shape=(4, 31, 1000))
    builder.op("aten._log_softmax")
    builder.allocate(MiB, Category.ACTIVATIONS, shape=(124, 1000))
    builder.allocate(MiB, Category.ACTIVATIONS, shape=(1, 1000))
    trace = builder.build()
    copies = logits_copies(trace, trace.peak_event)
    assert copies is not None
    assert copies.count == 3


def test_a_step_without_a_log_softmax_has_no_logits() -> None:
    builder = TraceBuilder()
    builder.enter(Phase.LOSS)
    builder.op("aten.mse_loss")
    builder.allocate(MiB, Category.ACTIVATIONS)
    assert logits_copies(builder.build(), 0) is None


def test_foreach_temporaries_are_named_with_their_bytes() -> None:
    builder = TraceBuilder()
    builder.allocate(8 * MiB, Category.WEIGHTS)
    builder.enter(Phase.UPDATE)
    builder.op("aten._foreach_sqrt", module="AdamW")
    for _ in range(2):
        builder.allocate(4 * MiB, Category.TEMPORARIES)
    trace = builder.build()
    copies = foreach_copies(trace, trace.peak_event)
    assert copies is not None
    assert (copies.count, copies.bytes) == (2, 8 * MiB)
    [sentence] = remarks(trace)
    assert sentence.startswith("The foreach update holds two temporary tensors at the peak (8.0 MiB, 50% of the peak)")


def test_the_math_backend_is_named_with_what_it_stores() -> None:
    builder = TraceBuilder()
    builder.allocate(12 * MiB, Category.WEIGHTS)
    builder.enter(Phase.FORWARD)
    builder.op("aten._safe_softmax", module="attention")
    builder.allocate(4 * MiB, Category.ACTIVATIONS, shape=(1, 4, 512, 512))
    trace = builder.build(notes=("attention runs on the math backend (flash: it takes no mask)",))
    [sentence] = remarks(trace)
    assert sentence == (
        "Attention runs on the math backend (flash: it takes no mask), which stores the scores of each query with each "
        "key: 4.0 MiB, 25% of the peak."
    )


def test_reserved_memory_that_is_never_used_is_told() -> None:
    trace = tiny_trace()
    assert remarks(trace) == ()
    fragmented = replace(trace, start_reserved_bytes=38 * MiB)
    [sentence] = remarks(fragmented)
    assert sentence.startswith("The allocator reserves 38.0 MiB, 19.0 MiB more than is ever in use: blocks cached")
