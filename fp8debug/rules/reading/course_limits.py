"""Thresholds for a loss that leaves its course, and for what may have led to it; the manual page of F125 has their sources."""

from __future__ import annotations

from dataclasses import dataclass

from fp8debug.loss_spikes import SpikeDetector


@dataclass(frozen=True)
class CourseLimits:
    """Thresholds of F125 and of the classification of a run.

    Attributes:
        min_noise: of a spike, least excess in noise; this and the next five are those of ``SpikeDetector``.
        min_rise: least excess relative to the usual loss.
        min_ratio: least excess relative to the largest of the last ``memory`` steps.
        window: steps of which the noise is taken.
        memory: steps whose excesses are remembered.
        min_history: steps before the first that is judged.
        level_steps: of a rise for good, losses whose median is a level.
        min_level_rise: least rise above the lowest level, relative.
        min_level_noise: the same in noise.
        min_level_ratio: the same relative to the largest rise that came back.
        max_level_noise: noise above the lowest level down to which a rise is followed back to its first step.
        recent_steps: of movements, sampled steps that count as just before.
        past_steps: sampled steps that count as the past of a statistic, at most.
        min_past_steps: the same, at least.
        min_moved_noise: distance from the median of its past, in standard deviations.
        min_moved_log2: distance of an amax from the range of its past, in binades.
        min_moved_db: the same of an SQNR, in dB.
        min_moved_underflow: the same of a share of nonzero elements that become zero.
        min_moved_overflow: the same of a share of elements that clip.
        min_moved_gain: the same of a gain.
        near_steps: sampled steps before the loss leaves its course within which a change or a warning may be the cause.
        min_changed_share: of modules whose casts change together before it is the run's configuration.
        min_lr_jump: factor by which a learning rate jumps up.
        at_once_steps: steps from the first within which a divergence is at once.
        min_everywhere_share: of the modules with a fault where a divergence is everywhere.
        max_fp8_noise: FP8's share of the gradient's noise up to which BF16 would have seen the same.
        gradient_steps: sampled steps just before, whose gradients and updates count for that.
        gap_steps: common steps by whose median the losses of a run and its baseline are compared.
        min_gap_errors: gap of the losses in standard errors.
        min_gap_share: gap relative to the baseline's loss.
        apart_steps: last steps that each lie apart from the baseline before half of ``gap_steps`` does.
        min_apart_noise: distance of each in standard deviations of the steps' differences.
        min_apart_share: distance of each relative to the baseline's loss.
    """

    min_noise: float = SpikeDetector.min_noise
    min_rise: float = SpikeDetector.min_rise
    min_ratio: float = SpikeDetector.min_ratio
    window: int = SpikeDetector.window
    memory: int = SpikeDetector.memory
    min_history: int = SpikeDetector.min_history
    level_steps: int = 10
    min_level_rise: float = 0.15
    min_level_noise: float = 8.0
    min_level_ratio: float = 1.5
    max_level_noise: float = 3.0
    recent_steps: int = 2
    past_steps: int = 16
    min_past_steps: int = 3
    min_moved_noise: float = 6.0
    min_moved_log2: float = 1.0
    min_moved_db: float = 3.0
    min_moved_underflow: float = 0.01
    min_moved_overflow: float = 0.001
    min_moved_gain: float = 0.02
    near_steps: int = 5
    min_changed_share: float = 0.5
    min_lr_jump: float = 4.0
    at_once_steps: int = 20
    min_everywhere_share: float = 0.5
    max_fp8_noise: float = 0.1
    gradient_steps: int = 4
    gap_steps: int = 20
    min_gap_errors: float = 4.0
    min_gap_share: float = 0.01
    apart_steps: int = 3
    min_apart_noise: float = 8.0
    min_apart_share: float = 0.1

    @property
    def moved_floors(self) -> dict[str, float]:
        """Distance from the range of its past at which a statistic has moved, by column; an amax in binades."""
        return {
            "amax": self.min_moved_log2,
            "sqnr_db": self.min_moved_db,
            "underflow_nonzero_rate": self.min_moved_underflow,
            "overflow_rate": self.min_moved_overflow,
            "gain": self.min_moved_gain,
        }

    @property
    def spike_detector(self) -> SpikeDetector:
        """A detector with these thresholds that has seen no loss yet."""
        return SpikeDetector(self.min_noise, self.min_rise, self.min_ratio, self.window, self.memory, self.min_history)
