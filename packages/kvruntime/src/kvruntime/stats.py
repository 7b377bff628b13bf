"""What an engine did, in numbers. Knows what is counted; the engine and its scheduler count."""

from dataclasses import dataclass

__all__ = ["EngineStats"]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine did since it was made.

    `num_prefill_tokens` and `num_cached_tokens` count the tokens of prompts that were computed and
    those that were found, once more for a sequence that was preempted. `num_deferrals` counts
    requests that had to wait for blocks, once each time until they ran; `num_bypasses` how often a
    later one was admitted before one of them; `num_rejections` requests that were refused;
    `num_swap_fallbacks` samples that were to be swapped and are recomputed, for want of host blocks.
    `tail_waste_slots` is taken when the pool was fullest. `contiguous_slots` is what reserving
    `max_model_len` slots for each sample that ran would have held at the busiest step.
    `num_leaked_blocks` counts blocks that are held though no request is.
    """

    num_prefill_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_steps: int
    num_deferrals: int
    num_bypasses: int
    num_evicted_blocks: int
    num_preemptions_recompute: int
    num_preemptions_swap: int
    num_swap_fallbacks: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    num_rejections: int
    peak_blocks: int
    num_forks: int
    num_copies: int
    tail_waste_slots: int
    contiguous_slots: int
    num_leaked_blocks: int
