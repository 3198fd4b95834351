"""Public calls inside a compiled function: torch.compile does not trace them."""

import pytest
import torch
from torch import nn

import pyflatness as pf

torch.manual_seed(0)
X, Y, W = torch.randn(8, 4), torch.randint(3, (8,)), torch.randn(3, 4)
NET = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).eval()


def at_head(x):
    return pf.head_flatness(2 * x, W).value + x.sum()


def of_network(x):
    return pf.measure(NET, nn.CrossEntropyLoss(), (2 * x, Y), measures=["trace"])["trace"].value + x.sum()


@pytest.mark.parametrize("function", [at_head, of_network])
def test_a_compiled_caller_gets_the_value_and_traces_its_own_operations_alone(function):
    traced = []

    def backend(graph, inputs):
        traced.extend(node.name for node in graph.graph.nodes if node.op.startswith("call_"))
        return graph.forward

    torch.compiler.reset()
    assert torch.compile(function, backend=backend)(X) == function(X)
    assert set(traced) <= {"mul", "a", "sum_1", "add"}


def test_the_call_itself_is_no_compiled_frame():
    torch.compiler.reset()
    compiled = torch.compile(at_head, backend="eager")
    torch._dynamo.utils.counters.clear()
    compiled(X)
    assert set(torch._dynamo.utils.counters["resumes"]) == {
        f"torch_dynamo_resume_in_at_head_at_{at_head.__code__.co_firstlineno + 1}"
    }
    assert torch._dynamo.utils.counters["frames"]["total"] == 2  # before the call, and behind it
