"""What one training step allocates: predicted on tensors without memory, or observed on real ones.

Everything ends in a `StepTrace` (`step_trace`, saved by `trace_json`). The step itself (`training_step`, `settings`), the record
of what it did (`recorder`) and the way from there to a trace (`assemble`) are shared by all rooms:

- prediction: `lowtide.trace`, which runs the step on ghosts in a subprocess
- ghost: tensors without memory, and what the target's kernels would allocate for them
- allocator: a replay of torch's caching allocator
- observation: `lowtide.observe` and the memory monitor
- attention: which backend an attention call takes, and why
- compiled: what a compiler makes of a forward and backward under a memory budget
- explanation: `lowtide.explain` and `lowtide.compare`
- leaks: `lowtide.find_leaks`
"""
