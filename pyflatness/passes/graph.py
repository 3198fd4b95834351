"""Read autograd's graph: one table of the properties of operations, by the names of torch's nodes.

A node knows the shapes and dtypes of an operation's results and the sources of its inputs, and its name tells the
operation. All conclusions from names are in this file; the readers (:mod:`.linearity`, :mod:`.kept_rows`,
:mod:`.tail`, :mod:`.neighbours`, :mod:`.accounting`) ask :func:`of`.
"""

import functools
import re
from typing import NamedTuple

from torch.autograd.graph import Node

from .. import private


class Operation(NamedTuple):
    """Hold the properties of an operation; none are known of one that is not in the table."""

    name: str  # without "Backward" and its number
    of_torch: bool  # whether it is torch's own, not a custom autograd function
    linear: str  # how it is linear: a key of _LINEAR; empty for an operation that is linear in nothing
    rows: str  # by which of its inputs each sample keeps its rows: a key of _ROWS; empty if that is not known
    moves: str  # how it moves rows by an index: a key of _MOVES; empty if it does not
    space: int  # spatial dimensions of the images that it pools; 0 for no pooling
    of_layer: bool  # whether it may stand between the output of a layer and its input
    at_once: bool  # whether vmap sends several cotangents through it faster
    same_entries: bool  # whether its result has the entries of its input, as views, copies and casts have
    biases: tuple[int, ...]  # the places of inputs that are added to the result, or scale what was normalised


# Piecewise linear in all real inputs together, in each input, or in some.
_LINEAR = {
    "quotient": re.compile(r"DivBackward\d+"),
    "product": re.compile(
        r"(\w*Convolution|Addmm|Mm|Bmm|Baddbmm|Addbmm|Mv|Dot|Mul|Linear|MkldnnLinear|PreluKernel|Embedding|"
        r"EmbeddingBag)Backward\d+"
    ),
    "batch norm": re.compile(r"(Native|Cudnn|Miopen)BatchNormBackward\d+"),
    "norm": re.compile(r"Native(Layer|Group)NormBackward\d+"),
    "reduction": re.compile(r"(ScatterReduce|IndexReduce|SegmentReduce)Backward\d+"),  # unless it is a product
    "piecewise": re.compile(
        r"(Relu|LeakyRelu|Hardtanh|Threshold|Abs|Clamp\w*|Max|Min|Amax|Amin|Maximum|Minimum|Where|MaskedFill|"
        r"Gather|Sort|Topk|IndexAdd|IndexCopy|IndexFill|IndexPut|Scatter|ScatterAdd|MaskedSelect|Add|Sub|Rsub|Neg|"
        r"Sum|Mean|Cumsum|\w*Pool[123]?D?\w*|\w*Pad\w*|Upsample\w+|PixelShuffle|"
        r"View|UnsafeView|ReshapeAlias|Reshape|Alias|T|Transpose|Permute|Movedim|Unsqueeze|Squeeze|Expand|Repeat|Flatten|"
        r"Unflatten|Cat|Stack|Split\w*|UnsafeSplit\w*|Chunk|Slice|Select|Narrow|Index|IndexSelect|Unbind|Unfold|Flip|Roll|"
        r"Diagonal|AsStrided|Clone|ToCopy|Col2Im|Im2Col)Backward\d+|(torch::autograd::)?CopyBackwards|"
        # Of FSDP2, and between DTensors and tensors: they pass values on, also between ranks.
        r"Register(Pre|Post)BackwardFunctionBackward|_FromTorchTensorBackward|_ToTorchTensorBackward|RedistributeBackward"
    ),
}
_OF_TORCH = re.compile(r"\w+Backward\d+|(torch::autograd::)?CopyBackwards|torch::autograd::CopySlices")

# The inputs that a sample's rows of the result depend on, row by row.
_ROWS = {
    "view": re.compile(r"(View|UnsafeView|ReshapeAlias|Squeeze|Unsqueeze)Backward\d+"),
    "pointwise": re.compile(
        r"(Relu|LeakyRelu|PreluKernel|Elu|Gelu|Silu|Mish|Sigmoid|LogSigmoid|Tanh|Softplus|Hardtanh|Hardswish|"
        r"Hardsigmoid|Threshold|Clamp\w*|Abs|Neg|Exp|Pow|Sqrt|Rsqrt|Add|Sub|Mul|Div|MaskedFill|Where|Alias|Clone|"
        r"ToCopy)Backward\d+"
    ),
    "pooling": re.compile(r"(?:Adaptive)?(?:Max|Avg)Pool([23])D\w*Backward\d+"),
    "attention": re.compile(r"ScaledDotProduct\w+Backward\d+"),
    "second": re.compile(r"AddmmBackward\d+"),
    "all": re.compile(r"(Cat|Stack|Bmm)Backward\d+"),
    "first": re.compile(
        r"(\w*Convolution|Mm|(?:Native|Cudnn|Miopen)BatchNorm|Native(?:Layer|Group)Norm|Softmax|LogSoftmax|"
        r"ConstantPadNd|Expand|Transpose|Permute|Slice|Select|Split|SplitWithSizes|Unbind)Backward\d+|"
        r"(Mean|Sum)Backward1"
    ),
}
# "from": an index names the row of the first input for each row of the result. "to": it names the row of the result to
# which each row of the second input goes; rows of the first input stay in place.
_MOVES = {
    "from": re.compile(r"(Index|IndexSelect)Backward\d+"),
    "to": re.compile(r"(IndexAdd|IndexCopy|IndexPut|IndexReduce|ScatterAdd|ScatterReduce)Backward\d+"),
}
_OF_A_LAYER = re.compile(
    r"(Addmm|Mm|Linear|MkldnnLinear|\w*Convolution|View|UnsafeView|ReshapeAlias|Squeeze|Unsqueeze)Backward\d+"
)
MAX_POOLING = "MaxPool2DWithIndicesBackward0"
_AT_ONCE = {
    *("AddmmBackward0", "MmBackward0", "ReluBackward0", "ViewBackward0", "UnsafeViewBackward0", "MeanBackward1"),
    *("AddBackward0", "ConvolutionBackward0", MAX_POOLING),
    *("NativeBatchNormBackward0", "CudnnBatchNormBackward0"),
}
_SAME_ENTRIES = {
    *("View", "UnsafeView", "ReshapeAlias", "Reshape", "Expand", "Unsqueeze", "Squeeze", "T", "Transpose", "Permute"),
    *("Slice", "Select", "Split", "SplitWithSizes", "Unbind", "Alias", "AsStrided", "Clone", "ToCopy", "Repeat", "Cat"),
    *("Stack", "Index"),
}
_BIASES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Add", "Sub", "Rsub"), (0, 1)),
    **dict.fromkeys(("Addmm", "Addmv", "Addbmm", "Baddbmm"), (0,)),
    "Convolution": (2,),
    **dict.fromkeys(("NativeLayerNorm", "NativeGroupNorm", "NativeBatchNorm"), (1, 2)),
}


@functools.lru_cache(maxsize=4096)
def of(name: str) -> Operation:
    """Return the properties of the operation of a node with this name."""
    own = name.rstrip("0123456789").removesuffix("Backward")
    pooling = _ROWS["pooling"].fullmatch(name)
    return Operation(
        own,
        bool(_OF_TORCH.fullmatch(name)),
        next((kind for kind, names in _LINEAR.items() if names.fullmatch(name)), ""),
        next((kind for kind, names in _ROWS.items() if names.fullmatch(name)), ""),
        next((kind for kind, names in _MOVES.items() if names.fullmatch(name)), ""),
        int(pooling[1]) if pooling else 0,
        bool(_OF_A_LAYER.fullmatch(name)),
        name in _AT_ONCE,
        own in _SAME_ENTRIES,
        _BIASES.get(own, ()),
    )


def shape(node: Node, number: int) -> tuple[int, ...]:
    """Return the shape of an operation's result number ``number``."""
    return tuple(private.results_of(node)[number].shape)
