"""Sweep once over the data with as many probes as a relative standard error needs: ``probes="adaptive"``.

Columns of square-root factors go backward in groups, see :mod:`.groups`. For layers in whose weight the model is not
linear, the rest of the Hessian is sampled by Hessian probes, see :mod:`.residuals`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .. import contractions
from ..contractions.quantities import Contribution
from ..errors import InputError
from ..hessian import block_traces, probes
from ..hessian.block_traces import BlockTraces
from ..numerics.signs import Signs
from ..numerics.variances import of_part, with_squares
from ..passes import cotangents
from ..passes.cotangents import Cotangents
from ..passes.guards import agree, rounding
from ..passes.layer_form import LayerForm
from ..passes.runner import Repeatable, Run
from . import groups, residuals
from .contracted import Contracted
from .groups import Groups, Probes, Tolerance
from .layer_sweep import Sweep, Values
from .residuals import Residuals, Rounds
from .subset import Subset

_SMALL = 128 * 2**10
"""Bytes of the largest output of a layer up to which overhead dominates a round for all samples, so that one forward
pass of the samples of many rounds takes less time."""

_PROBES = 5  # columns of an exact value that go backward in the time of a sample's probes
PLAN, _PLANS = 1.2e6, 5e8
"""Multiply-adds of a backward pass in the time that the plan for a sample takes, and that of all data besides. Measured
on one thread of a CPU: perceptrons of 10 to 100 classes and LeNet5, 64 to 2,000 samples."""

_CHOICE = -1  # the stream that chooses the groups with a replicate

Found = tuple[Tensor, Mapping[int, Tensor]]  # places of samples, and by number of a layer values (k, quantities, s)


@dataclass
class Grouped:
    """Hold the probes of a micro-batch, and the sums of their values.

    A round that at least half of the samples have is sent on the existing graph, for all samples at once. The remaining
    probes are packed: samples are repeated as rows of full batches, with a new forward pass.
    """

    left: Repeatable  # of the micro-batch's run
    sent: Cotangents
    weights: Tensor  # over chances, (n, columns) float64, 0 for samples that are not finite
    finite: Tensor  # (n,), the other samples
    groups: Groups
    probes: Probes
    signs: Tensor  # (2, n, columns) int8: of probes and of their replicates
    sums: Tensor  # (layers, quantities, n) float64
    differences: Tensor  # (layers, quantities, pairs) float64, between a probe and its replicate
    replicated: Tensor  # (pairs,) float64, v_g (1/π - ½) of their groups
    chances: Tensor  # (n,) float64, of each sample to be in the part of the data that is sent
    rounds: int = 0  # of probes, that were sent for all samples at once

    def rows(self, chosen: Tensor) -> Tensor:
        """Return signs of the columns of some probes, (s, columns) int8, 0 for columns of other groups."""
        probes, places = self.probes, self.probes.samples[chosen]
        kept = self.groups.of[places] == probes.groups[chosen].unsqueeze(1)
        return torch.where(kept, self.signs[probes.replicates[chosen], places], 0)

    def of_round(self, number: int) -> tuple[Tensor, Tensor]:
        """Return a round's probes, and its cotangent for all samples; NaN for those that are not finite."""
        chosen = (self.probes.rounds == number).nonzero().flatten()
        rows = torch.zeros_like(self.signs[0]).index_copy_(0, self.probes.samples[chosen], self.rows(chosen))
        return chosen, self.sent.chosen(rows.float().masked_fill_(~self.finite.unsqueeze(1), torch.nan))

    def silent(self, chosen: Tensor) -> Tensor:
        """Return the samples, (n,), without a probe in a round."""
        return torch.ones_like(self.finite).index_fill_(0, self.probes.samples[chosen], False) & self.finite

    def packed(self, chosen: Tensor) -> Tensor:
        """Return the cotangents of some probes, one in each row of a batch."""
        return self.sent.take(self.probes.samples[chosen]).chosen(self.rows(chosen).float())

    def add_round(self, chosen: Tensor, values: Tensor) -> None:
        """Add values (layers, quantities, n) of a round; those of samples without a probe in it are 0, or NaN."""
        places = self.probes.samples[chosen]
        fractions = values.new_zeros(values.shape[2]).index_copy_(0, places, self.probes.fractions[chosen])
        self.sums += values * fractions
        self._compare(chosen, values[..., places])

    def add(self, chosen: Tensor, values: Tensor) -> None:
        """Add values (layers, quantities, s) of some probes."""
        self.sums.index_add_(2, self.probes.samples[chosen], values * self.probes.fractions[chosen])
        self._compare(chosen, values)

    def _compare(self, chosen: Tensor, values: Tensor) -> None:
        kept = self.probes.pairs[chosen] >= 0
        again = self.probes.replicates[chosen] == 1
        signed = torch.where(again, -values, values)[..., kept]
        self.differences.index_add_(2, self.probes.pairs[chosen][kept], signed)

    def variances(self) -> Tensor | None:
        """Return unbiased variances of each sample's sum, the sum of its groups' squared ones, and its replicates.

        They are (3, layers + 1, quantities, n); the last layer is the network. None if the sums are exact.
        """
        if not bool((self.groups.variances > 0).any()):
            return None
        both = torch.cat([self.differences, self.differences.sum(dim=0, keepdim=True)])
        found = with_squares(both.square() / 2 * (1 / self.probes.chances - 0.5))
        found = torch.cat([found, torch.ones_like(found[:1])])
        again = self.probes.samples[self.probes.replicates == 1]
        return both.new_zeros(*found.shape[:-1], self.sums.shape[2]).index_add_(3, again, found)


@dataclass(frozen=True)
class _Begun:
    """Hold a micro-batch's probes and values while its graph is gone, until the remaining probes are sent."""

    part: Grouped  # the GGN's probes
    forms: Mapping[str, LayerForm]  # of the layers with these probes
    rest: Residuals | None  # the residuals of layers in whose weight the model is not linear; None without them
    prints: Mapping[str, Tensor]  # these layers' fingerprints of their rows
    left_out: Tensor  # (n,), see Sweep._left_out
    nonlinear: Sequence[str]  # the layers with residuals


class AdaptiveSweep(Sweep):
    """Sweep as the base class does, and also with probes chosen by ``rtol``."""

    _exact: bool | None = None  # whether exact values are cheaper, once that is known
    _subset: Subset | None = None

    def by_groups(self, take: Callable[[Values], None], subset: Subset | None = None, share: float = 1.0) -> None:
        """Pass every sample's quantities to ``take``, sampled within a ``share`` of the variance that ``rtol`` allows.

        Columns of square-root factors are sent in groups, and residuals, see :mod:`.residuals`, are sampled. If exact
        values cost less, see :meth:`_is_cheap`, these are passed. If the samples are a part of the data, ``subset``,
        each is weighted by the inverse of its probability to be in it.
        """
        self._runner.batches.shard.ranks.refuse("probes='adaptive'", "pass probes=k, a number of probes, ")
        rtol = self._options.rtol or groups.RTOL
        samples = self._runner.batches.samples if subset is None else subset.count
        tolerance = Tolerance(share**0.5 * rtol, samples)
        self._subset, self._in_part = subset, subset is not None
        predictor = residuals.Predictor(rtol, tolerance)

        def finish(begun: _Begun | Values) -> None:
            if isinstance(begun, Values):
                take(begun)
                return
            part, rest = begun.part, begun.rest
            if begun.forms:
                self._finish(begun)
            values, variances = part.sums, [part.variances()]
            if rest is not None:
                rest.want(predictor.wanted(rest, part.sums, ggn_is_exact=variances[0] is None))
                self._finish_residuals(rest, begun)
                predictor.add(rest, part.sums)
                values, variances = values + rest.means, [*variances, rest.variances()]
            found = part.sums.new_zeros(3, *part.sums.shape) if variances[0] is None else variances[0][:, :-1]
            tolerance.add(part.weights, part.sums / part.chances, of_part(found, part.chances), part.replicated)
            sampled = [each for each in variances if each is not None]
            by_hessian = frozenset() if rest is None else frozenset(begun.nonlinear)
            self.by_hessian.update(by_hessian)
            take(
                Values(
                    self._marked(values.unsqueeze(0), part.sent, begun.left_out, part.left.number),
                    part.sent.sample_weights,
                    part.left.number,
                    torch.stack(sampled).sum(dim=0) if sampled else None,
                    part.sent.sizes() if subset is not None else None,
                    lost=part.sent.bad,
                    by_hessian=by_hessian,
                )
            )

        samples_of_first = tolerance.first

        def first() -> int | None:
            return None if self._exact else samples_of_first

        def work(run: Run) -> Callable[[], None] | None:
            begun = self._begun(run, tolerance)
            return None if begun is None else partial(finish, begun)

        chosen = None if subset is None else subset.chosen
        self._runner.each(work, lambda finish_it: finish_it(), first=first, chosen=chosen)

    def _begun(self, run: Run, tolerance: Tolerance) -> "_Begun | Values | None":
        """Plan a micro-batch's probes, and send the rounds for all samples backward.

        Return exact values instead if these are cheaper; None if this run is the first to show that.
        """
        if self._exact:
            return self._values(run)
        linear, nonlinear = self._ran(run)
        sent = cotangents.of_run(run, self._loss)
        if self._exact is None:
            self._exact = not nonlinear and self._is_cheap(run, sent, linear)
            if self._exact:
                return None
        self._head_formula.compare(run, sent, linear)
        heads, forms = self._head_formula.split(run, sent, linear)
        forms |= {name: self._forms[name] for name in nonlinear}
        self.columns = max(self.columns, sent.passes)
        part = self._grouped(run, sent, tolerance, residuals.GGN_SHARE if nonlinear else 1.0)
        rounds = 0
        if sent.passes and forms:
            rounds = part.probes.common_rounds(self._having(run))
        contracted = Contracted(run, forms, forms, rounds)
        for number in range(rounds):
            chosen, cotangent = part.of_round(number)
            values = self._stacked(contracted.of(cotangent), part.sums)
            silent = part.silent(chosen)
            for name, heard in zip(self._runner.selected, values.nan_to_num(0.0).any(dim=1), strict=True):
                if bool((heard & silent).any()):
                    raise _disordered(name)
            part.add_round(chosen, values)
        part.rounds = rounds
        for name, value in heads.items():
            part.sums[self._runner.places[name], self._head_formula.columns] = value
        self._mark_underflow(run, part.sums.unsqueeze(0))
        rest = self._pilot(run, nonlinear, tolerance.expected(run.samples)) if nonlinear else None
        prints = {name: form.fingerprints(run) for name, form in forms.items()}
        return _Begun(part, forms, rest, prints, self._left_out(run, sent), nonlinear)

    def _grouped(self, run: Run, sent: Cotangents, tolerance: Tolerance, share: float) -> Grouped:
        """Plan a run's probes, which get a ``share`` of the allowed variance.

        A sample that is in a part of the data with probability π, of ``chances`` (n,), stands for 1/π samples. Its
        variance is weighted by 1/π, and so its weights by 1/√π in groups; in sums they are weighted by 1/π.
        """
        sizes, weights, options = sent.sizes(), sent.weights(), self._options
        chances = torch.ones_like(sizes) if self._subset is None else self._subset.chances(sizes)
        finite = weights.isfinite().all(dim=1)
        whole = torch.where(finite.unsqueeze(1), weights, 0.0) / chances.unsqueeze(1)
        found = groups.group(whole * chances.sqrt().unsqueeze(1), tolerance.allowed(whole, share))
        replicating = groups.chances(found.variances, tolerance.replicates)
        uniform = Signs(options.seed, [0]).uniform(_CHOICE, run.numbers, replicating.shape[1])[0]
        planned = groups.probes(found, replicating, uniform)
        if len(planned.samples) > options.max_passes * run.samples:
            raise InputError(
                f"probes='adaptive' takes {len(planned.samples) / run.samples:.0f} cotangents a sample for this rtol, "
                f"more than max_passes={options.max_passes}; pass a larger rtol= or max_passes=, or probes=k, a number "
                "of probes"
            )
        signs = Signs(options.seed, [0, 1])(cotangents.STREAM, run.numbers, sent.places)
        sums = weights.new_zeros(len(self._runner.selected), len(self.quantities), run.samples)
        differences = weights.new_zeros(*sums.shape[:2], len(planned.chances))
        replicated = found.variances[uniform < replicating] * (1 / planned.chances - 0.5)
        left = Repeatable.of(run)
        return Grouped(left, sent, whole, finite, found, planned, signs, sums, differences, replicated, chances)

    def _is_cheap(self, run: Run, sent: Cotangents, forms: Mapping[str, LayerForm]) -> bool:
        """Return whether exact values of all data take less time than planning and sending probes."""
        work = sum(forms[name].matrix[0, 0].numel() * call.output.numel() for name in forms for call in run.calls(name))
        of_plan = PLAN * run.samples + _PLANS * run.samples / (self._runner.batches.samples or math.inf)
        return sent.passes <= self._options.max_passes and (sent.passes - _PROBES) * work <= of_plan

    def _having(self, run: Run) -> float:
        """Return the least samples with a round for which it is sent for all at once; other rounds are packed."""
        if not self._runner.cuttable:
            return 1
        largest = max(call.output.nbytes for name in self._runner.modules for call in run.calls(name))
        return run.samples / 2 if largest > _SMALL else math.inf

    def _finish(self, begun: "_Begun") -> None:
        """Send the remaining probes, packed into full batches of repeated samples."""
        part, forms = begun.part, begun.forms
        left = (part.probes.rounds >= part.rounds).nonzero().flatten()
        places = part.probes.samples[left]

        def send(which: slice, run: Run) -> tuple[Tensor, Tensor]:
            names = self._checked(run, begun, places[which])
            values = Contracted(run, forms, names, 1).of(part.packed(left[which]))
            return left[which], self._stacked(values, part.sums.new_empty(*part.sums.shape[:2], run.samples))

        self._runner.repeat(part.left, places, send, lambda found: part.add(*found))

    def _checked(self, run: Run, begun: "_Begun", places: Tensor) -> list[str]:
        """Return the layers of a run of repeated samples, after a check that their rows are those of these samples."""
        linear, nonlinear = self._ran(run)
        names = [name for name in (*linear, *nonlinear) if name in begun.forms]
        for name in names:
            before, now = begun.prints[name][places], begun.forms[name].fingerprints(run)
            if not agree(before, now, rounding(run.outputs.dtype)):
                raise _disordered(name)
        return names

    def _pilot(self, run: Run, names: Sequence[str], expected: int) -> Residuals:
        """Send the first probes of some layers' residuals, for all samples."""
        every = torch.arange(run.samples, device=run.outputs.device)
        with block_traces.differentiable(names), contractions.full_precision(run.outputs):
            sizes, traces = self._residuals(run, names)
            shape = len(self._runner.selected), len(self.quantities)
            rest = Residuals(shape, sizes, residuals.pilot(expected), self._options.max_passes)
            for name, each in traces.items():
                layer = self._runner.places[name]
                numbers = rest.begin(layer, each.products)
                rest.add(layer, every, self._probed(each, name, numbers), numbers)
        return rest

    def _finish_residuals(self, rest: Residuals, begun: "_Begun") -> None:
        """Send the further probes that residuals need."""
        names, places_of = [*self._runner.selected], self._runner.places
        for places, rounds in rest.steps(whole=not self._runner.cuttable):

            def send(which: slice, run: Run, places: Tensor = places, rounds: Rounds = rounds) -> Found:
                ran = self._checked(run, begun, places[which])
                chosen = [names[layer] for layer in rounds if names[layer] in ran]
                with block_traces.differentiable(chosen), contractions.full_precision(run.outputs):
                    traces = self._residuals(run, chosen)[1] if chosen else {}
                    values = {places_of[n]: self._probed(each, n, rounds[places_of[n]]) for n, each in traces.items()}
                shape = 1, len(self.quantities), run.samples
                nothing = torch.zeros(shape, dtype=torch.float64, device=run.outputs.device)  # of one that did not run
                return places[which], {layer: values.get(layer, nothing) for layer in rounds}

            def take(found: Found, rounds: Rounds = rounds) -> None:
                for layer, values in found[1].items():
                    rest.add(layer, found[0], values, rounds[layer])

            self._runner.repeat(begun.part.left, places, send, take)

    def _probed(self, traces: BlockTraces, name: str, numbers: range | None) -> Tensor:
        """Return values of some probes of a layer, (k, quantities, n) float64; for None exact ones, with k = 1."""
        if numbers is None:
            return traces.exact().values.unsqueeze(0)
        signs = Signs(self._options.seed, numbers)
        return probes.sampled([traces], [self._stream(name)], self.quantities, signs)[:, 0]

    def _stacked(self, contributions: Iterable[tuple[str, Contribution]], like: Tensor) -> Tensor:
        """Return contributions (layers, quantities, n) of all selected layers; 0 for one that did not run."""
        stacked = torch.zeros_like(like)
        for name, contribution in contributions:
            stacked[self._runner.places[name], : len(contribution.values)] = contribution.values
        return stacked


def _disordered(name: str) -> InputError:
    return InputError(
        f"layer {name!r}: its inputs for the same samples change with the batch they are in, or come in another order "
        "than the model's outputs; pass probes=k, a number of probes"
    )
