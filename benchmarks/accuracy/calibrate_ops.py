"""Measure what CUDA libraries allocate beyond an operator's outputs, over a grid of shapes, on a real GPU.

The hardware profile's workspace rules are fitted to these figures. Prints one JSON file.

    python -m benchmarks.accuracy.calibrate_ops OUT.json
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F


def cost(call: Callable[[], Any]) -> tuple[int, int, int]:
    """Peak and lasting bytes of a call, above the start: (highest, outputs alive, after dropping the outputs)."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = call()
    torch.cuda.synchronize()
    peak, end = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    del out
    return peak, end, torch.cuda.memory_allocated() - before


def workspaces() -> dict[str, Any]:
    """First-use cost of the matrix libraries, each kind in the order a training step meets them."""
    rows = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        a, b, bias = (torch.randn(*s, device="cuda", dtype=dtype) for s in ((1024, 1024), (1024, 1024), (1024,)))
        rows[f"mm {dtype}"] = cost(lambda: a @ b)
        rows[f"addmm {dtype}"] = cost(lambda: torch.addmm(bias, a, b))
        rows[f"bmm {dtype}"] = cost(lambda: torch.bmm(a[None], b[None]))
        w = torch.randn(1024, 1024, device="cuda", dtype=dtype, requires_grad=True)
        out = F.linear(a, w, bias)
        rows[f"linear backward {dtype}"] = cost(lambda: out.sum().backward())
        w.grad = None
        rows[f"linear gelu? {dtype}"] = cost(lambda: torch._addmm_activation(bias, a, b))
    return rows


def only_addmm() -> dict[str, Any]:
    a, b, bias = (torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in ((4096, 4096), (4096, 4096), (4096,)))
    return {"addmm first": cost(lambda: torch.addmm(bias, a, b)), "then mm": cost(lambda: a @ b)}


def convolutions() -> list[Any]:
    rows = []
    grid = [
        # batch, in, out, size, kernel, stride, padding, groups, transposed
        *((n, ci, co, s, k, st, k // 2, 1, False)
          for n in (1, 8, 32) for (ci, co) in ((3, 64), (64, 64), (64, 256), (256, 64), (256, 512), (512, 512), (1024, 2048))
          for s in (7, 14, 28, 56, 112) for k, st in ((1, 1), (1, 2), (3, 1), (3, 2), (7, 2))
          if n * max(ci, co) * s * s <= 32 * 256 * 56 * 56),
        *((n, c, c, s, k, 1, k // 2, c, False) for n in (8, 32) for c in (96, 384) for s in (7, 14, 56) for k in (3, 7)),
        *((n, c, c, s, 3, 1, 1, 32, False) for n in (8, 32) for c in (256, 512) for s in (14, 56)),
        *((n, 3, c, 224, k, k, 0, 1, False) for n in (8, 64) for c in (96, 768) for k in (4, 16)),
        *((n, ci, ci // 2, s, 2, 2, 0, 1, True) for n in (4, 8) for ci in (128, 512, 1024) for s in (16, 32, 64)),
    ]  # fmt: skip
    for case, dtype, channels_last in itertools.product(grid, (torch.float32, torch.bfloat16), (False, True)):
        n, ci, co, size, k, stride, pad, groups, transposed = case
        layout = torch.channels_last if channels_last else torch.contiguous_format
        try:
            x = torch.randn(n, ci, size, size, device="cuda", dtype=dtype).to(memory_format=layout)
            shape = (ci, co, k, k) if transposed else (co, ci // groups, k, k)
            w = torch.randn(shape, device="cuda", dtype=dtype).to(memory_format=layout)
            args = ([stride] * 2, [pad] * 2, [1, 1], transposed, [0, 0], groups)
            forward = lambda: torch.ops.aten.convolution(x, w, None, *args)  # noqa: E731
            y = forward()
            up = cost(forward)
            gy = torch.randn_like(y)
            down = {}
            for name, mask in {
                "both": [True, True, False],
                "input": [True, False, False],
                "weight": [False, True, False],
            }.items():
                backward = lambda: torch.ops.aten.convolution_backward(gy, x, w, None, *args, mask)  # noqa: E731
                backward()
                down[name] = cost(backward)
            rows.append([*case, str(dtype), channels_last, up, down, list(y.shape)])
        except Exception as error:
            rows.append([*case, str(dtype), channels_last, f"{type(error).__name__}: {error}"[:200]])
        x = w = y = gy = None
    return rows


def others() -> list[Any]:
    rows: list[Any] = []

    def add(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
            rows.append([name, *cost(call)])
        except Exception as error:
            rows.append([name, f"{type(error).__name__}: {error}"[:200]])

    def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    aten = torch.ops.aten
    for tokens, vocab, width in itertools.product((512, 4096, 16384, 65536), (1000, 32000, 128256), (256, 1024, 4096)):
        if tokens * width <= 16384 * 4096 and vocab * width <= 128256 * 4096:
            ids = torch.randint(0, vocab, (tokens,), device="cuda")
            for dtype in (torch.float32, torch.bfloat16):
                g = rand(tokens, width, dtype=dtype)
                add(f"embedding_dense_backward {tokens} {vocab} {width} {dtype}",
                    lambda: aten.embedding_dense_backward(g, ids, vocab, -1, False))  # fmt: skip
    for rows_, cols in (
        (4096, 768),
        (16384, 768),
        (16384, 4096),
        (65536, 1024),
        (512, 512),
        (262144, 96),
        (100352, 96),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            x, w = rand(rows_, cols, dtype=dtype), rand(cols, dtype=dtype)
            g = torch.randn_like(x)
            _, mean, rstd = aten.native_layer_norm(x, [cols], w, w, 1e-5)
            add(f"layer_norm_backward {rows_} {cols} {dtype}",
                lambda: aten.native_layer_norm_backward(g, x, [cols], mean, rstd, w, w, [True] * 3))  # fmt: skip
            _, r = aten._fused_rms_norm(x, [cols], w, 1e-5)
            add(f"rms_norm_backward {rows_} {cols} {dtype}",
                lambda: aten._fused_rms_norm_backward(g, x, [cols], r, w, [True, True]))  # fmt: skip
            add(f"sum0 {rows_} {cols} {dtype}", lambda: x.sum(0))
            add(f"sum1 {rows_} {cols} {dtype}", lambda: x.sum(1))
            add(f"sumall {rows_} {cols} {dtype}", lambda: x.sum())
            add(f"mean-1 {rows_} {cols} {dtype}", lambda: x.mean(-1))
            add(f"cumsum {rows_} {cols} {dtype}", lambda: x.cumsum(0))
            add(f"softmax {rows_} {cols} {dtype}", lambda: x.softmax(-1))
            add(f"topk {rows_} {cols} {dtype}", lambda: x.topk(2, -1))
            add(f"sort {rows_} {cols} {dtype}", lambda: x.sort(-1))
            add(f"norm {rows_} {cols} {dtype}", lambda: torch.linalg.vector_norm(x))
            add(f"foreach_norm {rows_} {cols} {dtype}", lambda: torch._foreach_norm([x, x]))
            idx = torch.randint(0, rows_, (rows_ // 2,), device="cuda")
            g2 = x[: rows_ // 2].clone()
            add(f"index_put_acc {rows_} {cols} {dtype}", lambda: aten.index_put(x, [idx], g2, True))
            add(f"index {rows_} {cols} {dtype}", lambda: x[idx])
            add(f"index_add {rows_} {cols} {dtype}", lambda: x.index_add(0, idx, g2))
            add(f"nonzero {rows_} {cols} {dtype}", lambda: (x > 1).nonzero())
            add(f"max {rows_} {cols} {dtype}", lambda: x.max())
            add(f"argmax {rows_} {cols} {dtype}", lambda: x.argmax(-1))
            add(f"bincount {rows_}", lambda: torch.bincount(idx))
            add(f"sort1d {rows_}", lambda: idx.sort())
            add(f"argsort1d {rows_}", lambda: idx.argsort(stable=True))
            add(f"cumsum1d {rows_}", lambda: idx.cumsum(0))
            add(f"unique {rows_}", lambda: idx.unique())
    for n, c, s in ((8, 64, 256), (8, 512, 32), (64, 64, 112), (64, 2048, 7), (8, 1024, 16), (32, 96, 56)):
        for dtype in (torch.float32, torch.bfloat16):
            for layout in (torch.contiguous_format, torch.channels_last):
                x = rand(n, c, s, s, dtype=dtype).to(memory_format=layout)
                g = torch.randn_like(x)
                w = rand(c, dtype=dtype)
                tag = f"{n} {c} {s} {dtype} {layout}"
                if layout is torch.channels_last:
                    continue
                out = aten.native_group_norm(x, w, w, n, c, s * s, 8, 1e-5)
                add(f"group_norm {tag}", lambda: aten.native_group_norm(x, w, w, n, c, s * s, 8, 1e-5))
                add(f"group_norm_backward {tag}",
                    lambda: aten.native_group_norm_backward(g, x, out[1], out[2], w, n, c, s * s, 8, [True] * 3))  # fmt: skip
                for wtype in {torch.float32, dtype}:
                    w2, r1, r2 = (torch.ones(c, device="cuda", dtype=wtype) for _ in range(3))
                    add(f"batch_norm {tag} {wtype}", lambda: F.batch_norm(x, r1, r2, w2, w2, True))
                    xr = x.detach().requires_grad_()
                    w3 = w2.clone().requires_grad_()
                    y = F.batch_norm(xr, r1, r2, w3, w3, True)
                    add(
                        f"batch_norm_backward {tag} {wtype}",
                        lambda: torch.autograd.grad(y, [xr, w3], g, retain_graph=True),
                    )
                add(f"max_pool {tag}", lambda: aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1]))
                y, i = aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])
                add(f"max_pool_backward {tag}",
                    lambda: aten.max_pool2d_with_indices_backward(y, x, [3, 3], [2, 2], [1, 1], [1, 1], False, i))  # fmt: skip
                add(f"avgpool {tag}", lambda: F.adaptive_avg_pool2d(x, 1))
                add(f"upsample {tag}", lambda: F.interpolate(x[:, :8], scale_factor=2, mode="bilinear"))
    for dtype, (b, h, hk, t, d) in itertools.product(
        (torch.bfloat16, torch.float32),
        ((4, 16, 16, 1024, 64), (4, 16, 4, 1024, 64), (2, 8, 8, 1000, 96), (1, 32, 8, 8192, 128), (16, 12, 12, 197, 64),
         (2, 4, 4, 512, 256), (4, 12, 12, 300, 80)),
    ):  # fmt: skip
        for dropout, causal, masked in itertools.product((0.0, 0.1), (False, True), (None, "bool", "float", "grad")):
            if masked and causal:
                continue
            q = rand(b, t, h, d, dtype=dtype).transpose(1, 2).requires_grad_()
            k, v = (rand(b, t, hk, d, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(2))
            mask = None
            if masked == "bool":
                mask = torch.ones(b, 1, t, t, dtype=torch.bool, device="cuda")
            elif masked:
                mask = torch.zeros(b, 1, t, t, dtype=dtype, device="cuda", requires_grad=masked == "grad")
            kwargs: dict[str, Any] = dict(attn_mask=mask, dropout_p=dropout, is_causal=causal, enable_gqa=h != hk)
            tag = f"{b},{h},{hk},{t},{d} {dtype} dropout={dropout} causal={causal} mask={masked}"
            add(f"sdpa {tag}", lambda: F.scaled_dot_product_attention(q, k, v, **kwargs))
            try:
                out = F.scaled_dot_product_attention(q, k, v, **kwargs)
                name = out.grad_fn.name()
                g = torch.randn_like(out)
                inputs = [q, k, v, *([mask] if masked == "grad" else [])]
                add(f"sdpa_backward {name} {tag}", lambda: torch.autograd.grad(out, inputs, g, retain_graph=True))
            except Exception as error:
                rows.append([f"sdpa_backward {tag}", str(error)[:200]])
            q = k = v = out = g = mask = None
    return rows


def recurrent() -> list[Any]:
    """CuDNN's recurrent layers: what the forward keeps and needs, and what the backward needs."""
    rows = []
    grid = itertools.product(
        ("LSTM", "GRU", "RNN"),
        (1, 2, 3),
        (256, 512, 1024),
        (8, 32),
        (64, 256),
        (False, True),
        (0.0, 0.1),
        (torch.float32, torch.bfloat16),
    )
    for kind, layers, width, batch, length, both_ways, dropout, dtype in grid:
        if (both_ways and dropout) or (dropout and layers == 1):
            continue
        try:
            module = getattr(torch.nn, kind)(
                width, width, layers, batch_first=True, dropout=dropout, bidirectional=both_ways
            )
            module = module.cuda().to(dtype)
            module.flatten_parameters()
            inputs = torch.randn(batch, length, width, device="cuda", dtype=dtype, requires_grad=True)
            out = module(inputs)[0]
            forward = cost(lambda: module(inputs)[0])
            gradient = torch.randn_like(out)
            wanted = [inputs, *module.parameters()]
            backward = cost(lambda: torch.autograd.grad(out, wanted, gradient, retain_graph=True))
            sizes = [p.numel() for p in module.parameters()]
            rows.append(
                [kind, layers, width, batch, length, both_ways, dropout, str(dtype), forward, backward, sum(sizes)]
            )
        except Exception as error:
            rows.append(
                [
                    kind,
                    layers,
                    width,
                    batch,
                    length,
                    both_ways,
                    dropout,
                    str(dtype),
                    f"{type(error).__name__}: {error}"[:200],
                ]
            )
    return rows


def forked(call: Callable[[], Any]) -> Any:
    """The result of a call made in a process of its own, so that nothing is warm."""
    with tempfile.NamedTemporaryFile() as file:
        pid = os.fork()
        if pid == 0:
            try:
                result = call()
            except Exception as error:
                result = {"error": f"{type(error).__name__}: {error}"}
            with Path(file.name).open("wb") as out:
                pickle.dump(result, out)
            os._exit(0)
        os.waitpid(pid, 0)
        with Path(file.name).open("rb") as source:
            return pickle.load(source)


if __name__ == "__main__":
    result = {}
    for call in (workspaces, only_addmm, others, recurrent, convolutions):
        result[call.__name__] = forked(call)
        print(call.__name__, "done", flush=True)
        Path(sys.argv[1]).write_text(json.dumps(result))  # after each part: a run that is cut short keeps what it has
