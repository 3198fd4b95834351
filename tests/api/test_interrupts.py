"""Ctrl-C at any line of a call: it is raised, and nothing is left behind, nor by a second one."""

import contextlib
import functools
import itertools
import os
import random
import signal
import threading
import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pyflatness as pf
from pyflatness import interrupts
from pyflatness.model import state
from support.combinations import every
from support.interrupting import KINDS, Handlers, Interrupting
from support.traces import CALLS, changed, everything, model


def lines(call, net):
    """How many there are; after it nothing is done for the first time."""
    call(net)
    with Interrupting() as count:
        call(net)
    return count.seen


def comes_of(error, kind):
    """Whether it is of a kind, or what torch raised while it was passing: some of torch's own ``finally`` do."""
    while "INTERNAL ASSERT FAILED" in str(error) and error.__context__ is not None:
        error = error.__context__
    return isinstance(error, kind)


def assert_interrupted(name, net, before, *at, kind="SIGINT"):
    __tracebackhide__ = True
    interrupting = Interrupting(*at, kind=kind)
    try:
        with interrupting:
            CALLS[name][1](net)
    except (interrupting.error, RuntimeError) as error:
        if not comes_of(error, interrupting.error):
            raise
        # A `with` statement's end can be cut off before `__exit__` has begun; a penalty that is deleted has no hooks.
        left = [each for each in changed(before, everything(net)) if name != "penalty" or "/hooks/" not in each]
        assert left == [], f"{name}, {kind} at {at}"
    else:
        assert not interrupting.sent, f"{name}: an interrupt at line {at} was lost"  # else the call had fewer lines
    assert changed(before, everything(net)) == [], f"{name}, {kind} at {at}"


def chosen(name, net, count):
    """Lines of a call, with more weight to its beginning and its end."""
    total, pick = lines(CALLS[name][1], net), random.Random(name)
    edge = min(total, 400)
    ends = [*range(1, edge + 1), *range(total - edge + 1, total + 1)]
    return pick.sample(range(1, total + 1), count - count // 3) + pick.sample(ends, count // 3)


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_leaves_nothing(name):
    net = model(CALLS[name][0])
    places = chosen(name, net, 2 if name in ("measure all", "sharpness", "measure") else 4)
    before = everything(net)
    for at in places:
        assert_interrupted(name, net, before, at)


@pytest.mark.parametrize("name", ["head", "adaptive_sharpness_mc", "fisher_rao", "head_flatness"])
def test_neither_does_a_second_one(name):
    """It comes while the call's changes are undone."""
    net = model(CALLS[name][0])
    places = chosen(name, net, 12)
    before = everything(net)
    for at in places:
        assert_interrupted(name, net, before, at, at + random.Random(at).randrange(1, 60))


def test_signals_wait_while_changes_are_undone(handled):
    """All steps are taken, whichever of them a signal comes in; one is enough for several of its kind."""
    taken, came = [], []

    def mine(number, frame):
        came.append(number)
        raise KeyboardInterrupt

    handled(mine)
    depth = interrupts.depth()
    for step in range(3):
        interrupts.later(lambda step=step: (signal.raise_signal(signal.SIGINT), taken.append(step)))
    with pytest.raises(KeyboardInterrupt):
        interrupts.undo(depth)
    assert (taken, came) == ([2, 1, 0], [signal.SIGINT])
    assert signal.getsignal(signal.SIGINT) is mine
    assert interrupts.depth() == depth


def test_a_step_that_is_cut_off_is_taken_again():
    """As one by an exception of another thread's, which nothing keeps from coming."""
    handler, todo, taken = signal.getsignal(signal.SIGINT), [KeyboardInterrupt], []

    def step():
        if todo:
            raise todo.pop()
        taken.append(signal.getsignal(signal.SIGINT))

    depth = interrupts.depth()
    interrupts.later(step)
    with pytest.raises(KeyboardInterrupt):
        interrupts.undo(depth)
    interrupts.undo(depth)
    assert len(taken) == 1
    assert taken[0] is not handler
    assert signal.getsignal(signal.SIGINT) is handler


@every(together=1, name=["head", "adaptive_sharpness_mc", "track", "penalty"],
       kind=["SIGALRM", "SIGTERM", "asynchronous"])  # fmt: skip
def test_other_signals_and_exceptions_leave_nothing(name, kind):
    """They come out as they were raised, and not as an error of the model's."""
    net = model(CALLS[name][0])
    places = chosen(name, net, 12)
    with Handlers():
        before = everything(net)
        for at in places:
            assert_interrupted(name, net, before, at, kind=kind)


class Held:
    @interrupts.cached_property
    def value(self):
        return object()


def test_an_interrupted_attribute_keeps_no_other_thread_from_it():
    """That of functools does before Python 3.12, by a lock of all instances."""
    for at in range(1, lines(lambda held: held.value, Held()) + 20):
        with contextlib.suppress(KeyboardInterrupt), Interrupting(at):
            Held().value  # noqa: B018
    found = []
    thread = threading.Thread(target=lambda: found.append(Held().value), daemon=True)
    thread.start()
    thread.join(60)
    assert found
    held = Held()
    assert held.value is held.value


@pytest.mark.soak
@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in CALLS for kind in KINDS])
def test_1500_interrupts_of_every_kind_leave_nothing(name, kind):
    net = model(CALLS[name][0])
    places = chosen(name, net, 1500 // len(CALLS) // len(KINDS) + 1)
    with Handlers():
        before = everything(net)
        for at in places:
            assert_interrupted(name, net, before, at, kind=kind)


@pytest.mark.soak
@pytest.mark.parametrize("name", CALLS)
def test_thousands_of_interrupts_leave_nothing(name):
    """5,060 of them: single ones at random lines, and every eleventh followed by a second."""
    net = model(CALLS[name][0])
    places = chosen(name, net, 220)
    before = everything(net)
    for number, at in enumerate(places):
        later = [at + random.Random(at).randrange(1, 200)] if number % 11 == 0 else []
        assert_interrupted(name, net, before, at, *later)


class Ends(Interrupting):
    """Notes the first place of each line of what puts back: of every ``__exit__``, and of what that calls."""

    def __init__(self):
        super().__init__()
        self.places = {}

    def _trace(self, frame, event, argument):
        found = super()._trace(frame, event, argument)
        if event == "line" and "__exit__" in (frame.f_code.co_name, frame.f_back.f_code.co_name):
            self.places.setdefault((frame.f_code.co_filename, frame.f_lineno), self.seen)
        return found


@pytest.mark.soak
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_of_what_puts_back_leaves_nothing(name):
    net = model(CALLS[name][0])
    lines(CALLS[name][1], net)
    with Ends() as ends:
        CALLS[name][1](net)
    before = everything(net)
    for at in ends.places.values():
        assert_interrupted(name, net, before, at)


@pytest.mark.soak
@pytest.mark.parametrize("name", CALLS)
def test_interrupts_at_any_time_leave_nothing(name):
    """As they come from outside, between any two bytecodes, or while a kernel runs."""
    net, pick = model(CALLS[name][0]), random.Random(name)
    CALLS[name][1](net)
    start = time.perf_counter()
    CALLS[name][1](net)
    whole = time.perf_counter() - start
    before, main = everything(net), threading.main_thread().ident
    interrupted = 0
    while interrupted < 40:
        timer = threading.Timer(pick.uniform(0, whole), signal.pthread_kill, (main, signal.SIGINT))
        try:
            timer.start()
            CALLS[name][1](net)
            timer.join()  # the call was faster than that
        except KeyboardInterrupt:
            interrupted += 1
            assert changed(before, everything(net)) == [], name
        timer.join()


def in_a_moment():
    """Sends an interrupt from another thread, soon."""

    def send():
        time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_data_that_are_waited_for_are_interrupted_at_once():
    net = model(CALLS["head"][0])
    before = everything(net)

    def batches():
        in_a_moment()
        time.sleep(30)
        yield "never"

    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        pf.relative_flatness(net, torch.nn.CrossEntropyLoss(), batches())
    assert time.perf_counter() - start < 20
    assert changed(before, everything(net)) == []


class Slow(torch.nn.Sequential):
    """Works as long as it is told to."""

    ran, working = 0, staticmethod(lambda: False)

    def forward(self, x):
        while self.working():
            time.sleep(0.01)
        type(self).ran += 1
        return super().forward(x)


@pytest.fixture
def slow():
    Slow.ran = 0
    return Slow(torch.nn.Linear(4, 3)).double()


DATA = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.arange(5) % 3


def test_a_model_that_hangs_is_interrupted(slow):
    before, threads = everything(slow), []

    def working():
        if not threads:
            threads.append(in_a_moment())
        return True

    slow.working = working
    with pytest.raises(KeyboardInterrupt):
        pf.measures.adaptive_sharpness_mc(slow, torch.nn.CrossEntropyLoss(), DATA)
    del slow.working
    assert changed(before, everything(slow)) == []
    assert slow.ran == 0


def test_a_loss_that_hangs_is_too(slow):
    before, threads = everything(slow), []

    def loss(outputs, targets):
        threads.append(in_a_moment())
        while True:
            time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        pf.generalization_gap(slow, loss, DATA, DATA)
    threads[0].join()
    assert changed(before, everything(slow)) == []


@pytest.fixture
def handled():
    """Sets a handler of SIGINT for a test."""
    before = signal.getsignal(signal.SIGINT)
    yield lambda handler: signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGINT, before)


def raised_once(net):
    """A forward that is interrupted at its first call."""
    todo = [signal.SIGINT]

    def forward(model, batch):
        if todo:
            signal.raise_signal(todo.pop())
        return model(batch[0]), batch[1]

    return pf.relative_flatness(net, torch.nn.CrossEntropyLoss(), DATA, forward=forward)


def test_handlers_of_the_user_s_are_called_and_stay(slow, handled):
    seen = []

    def mine(number, frame):
        seen.append(number)

    handled(mine)
    expected = pf.relative_flatness(slow, torch.nn.CrossEntropyLoss(), DATA)
    assert float(raised_once(slow)) == float(expected)
    assert seen == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is mine


def test_an_ignored_signal_stays_ignored(slow, handled):
    handled(signal.SIG_IGN)
    raised_once(slow)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_handler_that_the_model_sets_stays(slow, handled):
    def mine(number, frame):
        pass

    def forward(model, batch):
        signal.signal(signal.SIGINT, mine)
        return model(batch[0]), batch[1]

    handled(signal.default_int_handler)
    pf.relative_flatness(slow, torch.nn.CrossEntropyLoss(), DATA, forward=forward)
    assert signal.getsignal(signal.SIGINT) is mine


def test_an_interrupt_in_a_call_inside_of_a_call(slow):
    inner = model(CALLS["adaptive_sharpness_mc"][0])
    before, inner_before = everything(slow), everything(inner)

    def forward(model, batch):
        with Interrupting(2000):
            CALLS["adaptive_sharpness_mc"][1](inner)
        return model(batch[0]), batch[1]

    with pytest.raises(KeyboardInterrupt):
        pf.relative_flatness(slow, torch.nn.CrossEntropyLoss(), DATA, forward=forward)
    assert slow.ran == 0
    assert changed(inner_before, everything(inner)) == []
    assert changed(before, everything(slow)) == []


def test_an_interrupt_beside_an_error_is_not_lost(slow):
    def forward(model, batch):
        signal.raise_signal(signal.SIGINT)
        raise ValueError("of the model's own")

    with pytest.raises(KeyboardInterrupt):
        pf.relative_flatness(slow, torch.nn.CrossEntropyLoss(), DATA, forward=forward)


def test_an_interrupt_that_an_error_replaced_is_not_lost(slow):
    """As some of torch's own ``finally`` raise, where the package looks for errors of the model's."""

    def forward(model, batch):
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            raise RuntimeError("of a transform's end")

    for call in (pf.relative_flatness, pf.measure):
        with pytest.raises(KeyboardInterrupt):
            call(slow, torch.nn.CrossEntropyLoss(), DATA, forward=forward)


def test_a_call_while_an_interrupt_is_handled(slow):
    """Its errors are its own, and what the user holds of the interrupt stays."""

    def interrupted():
        held = torch.ones(3)
        raise KeyboardInterrupt(held.sum())

    try:
        interrupted()
    except KeyboardInterrupt as error:
        handled = error.__traceback__
        assert pf.relative_flatness(slow, torch.nn.CrossEntropyLoss(), DATA).samples == 5
        with pytest.raises(pf.errors.InputError, match="raised RuntimeError"):
            pf.relative_flatness(slow, torch.nn.CrossEntropyLoss(), (DATA[0][:, 1:], DATA[1]))
    assert "held" in handled.tb_next.tb_frame.f_locals


def test_what_the_user_s_code_makes_of_an_interrupt_is_its_own(slow, handled):
    class LateError(Exception):
        pass

    def late(number, frame):
        raise LateError

    def forward(model, batch, cause):
        try:
            signal.raise_signal(signal.SIGINT)
        except (LateError, KeyboardInterrupt) as error:
            raise RuntimeError("a limit of the model's") from (error if cause else None)

    for handler, cause in itertools.product((late, signal.default_int_handler), (True, False)):
        handled(handler)
        with pytest.raises(pf.errors.InputError, match="a limit of the model's"):
            pf.measure(
                slow, torch.nn.CrossEntropyLoss(), DATA, forward=lambda m, batch, cause=cause: forward(m, batch, cause)
            )


class Sparse(Slow):
    def __init__(self, *layers):
        super().__init__(*layers)
        self.register_buffer("graph", torch.eye(5).double().to_sparse())

    def forward(self, x):
        return super().forward(self.graph @ x)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_buffer_of_another_layout_stays(error):
    net = Sparse(torch.nn.Linear(4, 3)).double()
    before = net.graph._version

    def forward(model, batch):
        raise error("stopped")

    with pytest.raises(error if error is KeyboardInterrupt else pf.errors.InputError, match="stopped"):
        pf.relative_flatness(net, torch.nn.CrossEntropyLoss(), DATA, forward=forward)
    assert (net.graph._version, interrupts.depth()) == (before, 0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_step_that_cannot_be_taken_keeps_no_other_from_it():
    taken, handler = [], signal.getsignal(signal.SIGINT)

    def impossible():
        raise ValueError("never")

    depth = interrupts.depth()
    for step in (functools.partial(taken.append, 0), impossible, functools.partial(taken.append, 2)):
        interrupts.later(step)
    with pytest.raises(ValueError, match="never"):
        interrupts.undo(depth)
    assert taken == [2, 0]
    assert interrupts.depth() == depth
    assert signal.getsignal(signal.SIGINT) is handler


def test_what_cuts_a_step_off_comes_out():
    """The step that puts the handlers back, for one: a signal can come in it."""

    class LateError(Exception):
        pass

    todo, taken = [LateError], []

    def step():
        if todo:
            raise todo.pop()
        taken.append(1)

    depth = interrupts.depth()
    interrupts.later(step)
    with pytest.raises(LateError):
        interrupts.undo(depth)
    assert (taken, interrupts.depth()) == ([1], depth)


class Cut(TorchDispatchMode):
    """Is interrupted when a tensor was changed in place, and its version not yet."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.add_.Tensor:
            raise KeyboardInterrupt
        return result


def test_a_buffer_is_put_back_whose_version_did_not_change():
    net = model(CALLS["head"][0])
    before = everything(net)
    with pytest.raises(KeyboardInterrupt), Cut():
        CALLS["head"][1](net)
    assert changed(before, everything(net)) == []


def test_an_interrupt_while_another_thread_has_its_turn(slow):
    start, stop = threading.Event(), threading.Event()

    def forward(model, batch):
        start.set()
        stop.wait(30)
        return model(batch[0]), batch[1]

    other = Slow(torch.nn.Linear(4, 3)).double()
    options = {"forward": forward}
    thread = threading.Thread(
        target=lambda: pf.relative_flatness(other, torch.nn.CrossEntropyLoss(), DATA, **options), daemon=True
    )
    thread.start()
    start.wait(30)
    before = everything(slow)["model"]
    try:
        in_a_moment()
        with pytest.raises(KeyboardInterrupt):
            pf.relative_flatness(slow, torch.nn.CrossEntropyLoss(), DATA)
        assert thread.is_alive()
        assert changed(before, everything(slow)["model"]) == []
    finally:
        stop.set()
        thread.join()


class LateError(Exception):
    """What a timeout raises."""


@pytest.mark.parametrize("where", ["model", "loss", "data"])
def test_what_a_timeout_raises_is_not_wrapped_nor_swallowed(slow, where):
    def late(number, frame):
        raise LateError("30 s are over")

    def ring():
        signal.raise_signal(signal.SIGALRM)

    def forward(model, batch):
        if where == "model":
            ring()
        return model(batch[0]), batch[1]

    def loss(outputs, targets):
        if where == "loss":
            ring()
        return torch.nn.functional.cross_entropy(outputs, targets)

    def batches():
        if where == "data":
            ring()
        yield DATA

    before, handler = everything(slow), signal.signal(signal.SIGALRM, late)
    try:
        for call in (pf.relative_flatness, pf.measure):
            with pytest.raises(LateError, match="30 s are over") as caught:
                call(slow, loss, batches(), forward=forward)
            assert type(caught.value) is LateError
            assert signal.getsignal(signal.SIGALRM) is late
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert changed(before, everything(slow)) == []


def test_data_that_handle_their_own_timeouts_can(slow):
    def late(number, frame):
        raise LateError

    def batches():
        try:
            signal.raise_signal(signal.SIGALRM)
        except LateError:
            yield DATA

    handler = signal.signal(signal.SIGALRM, late)
    try:
        assert pf.relative_flatness(slow, torch.nn.CrossEntropyLoss(), batches()).samples == 5
    finally:
        signal.signal(signal.SIGALRM, handler)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_fork_while_a_thread_measures_can_measure(slow):
    inside, stop = threading.Event(), threading.Event()
    other = model(CALLS["head"][0])
    before, handler = everything(other)["model"], signal.getsignal(signal.SIGINT)

    def forward(measured, batch):
        inside.set()
        stop.wait(30)
        return measured(batch[0]), batch[1]

    call = functools.partial(pf.relative_flatness, other, torch.nn.CrossEntropyLoss(), DATA, forward=forward)
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    inside.wait(30)
    child = os.fork()
    if not child:  # the other thread is not here, and what it was about to put back has been
        signal.alarm(60)
        fine = changed(before, everything(other)["model"]) == []
        fine &= state._turn.acquire(timeout=5)
        os._exit(0 if fine and signal.getsignal(signal.SIGINT) is handler else 1)
    stop.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert changed(before, everything(other)["model"]) == []


def test_reparameterizing_in_place_is_all_or_nothing():
    """The function is the same whatever line is interrupted: no weight is multiplied without those behind it."""
    net = model(CALLS["reparameterize"][0])
    expected = net(DATA[0])

    def call(net):
        pf.reparameterize(net, {"body": 2.0}, [DATA], inplace=True)

    for at in random.Random(0).sample(range(1, lines(call, net)), 30):
        with contextlib.suppress(KeyboardInterrupt), Interrupting(at) as interrupting:
            call(net)
            assert not interrupting.sent, f"an interrupt at line {at} was lost"
        assert torch.allclose(net(DATA[0]), expected, rtol=1e-12)


def test_other_threads_are_left_alone():
    """They get no signals; nothing is set there."""
    found = []

    def look():
        with interrupts.shielded():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]
