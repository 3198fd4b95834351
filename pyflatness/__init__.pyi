"""The public names, each by the module that defines it."""

from . import errors as errors
from . import measures as measures
from . import results as results
from . import statistics as statistics
from . import theory as theory
from .api import block_traces as block_traces
from .api import head_flatness as head_flatness
from .api import layers as layers
from .api import measure as measure
from .api import relative_flatness as relative_flatness
from .curvature import changes as changes
from .curvature.allocate import allocate as allocate
from .curvature.cost_of_change import cost_of_change as cost_of_change
from .curvature.importance import importance as importance
from .curvature.landscape import landscape as landscape
from .curvature.landscape import linear_interpolation as linear_interpolation
from .curvature.spectrum import spectrum as spectrum
from .measures.representation import representation as representation
from .measures.worst_case import worst_case_sharpness as worst_case_sharpness
from .model.calling import causal_lm as causal_lm
from .reparameterization.reparameterize import reparameterize as reparameterize
from .scoring.result_files import add_to_store as add_to_store
from .scoring.score import score as score
from .theory.gap import generalization_gap as generalization_gap
from .theory.invariance import invariances as invariances
from .training.head_penalty import flatness_penalty as flatness_penalty
from .training.layer_penalty import FlatnessPenalty as FlatnessPenalty
from .training.track import track as track
from .verification import verify as verify

__version__: str
