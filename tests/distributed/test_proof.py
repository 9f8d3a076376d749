"""Programs that do not fit together are refused when they are compiled, on all ranks."""

import autopar
from autopar.cost_models.errors import VerificationError
from autopar.lower import Lowering
from autopar.passes.torch_ops import ISEND
from tests.passes.pipelines import Tied, tokens

MICROBATCHES = 3


def compile_spoilt(spoilt_rank):
    """What compiling says on this rank where a message of ``spoilt_rank`` has another tag."""
    right = Lowering.program

    def program(self, rank):
        made = right(self, rank)
        if rank == spoilt_rank:
            send = made.graph_module.graph.find_nodes(op="call_function", target=ISEND)[0]
            send.update_arg(2, 99)
        return made

    Lowering.program = program
    wishes = autopar.Constraints(dp=1, tp=1, pp=2, microbatches=MICROBATCHES)
    try:
        autopar.compile(Tied(), tokens(rows=6), constraints=wishes)
    except VerificationError as error:
        return str(error)
    finally:
        Lowering.program = right
    return ""


def test_what_does_not_fit_is_refused_on_all_ranks(ranks):
    first, second = ranks(2, compile_spoilt, 1)
    assert first == second
    assert "transfer 0 from rank 1 to rank 0 in group 'pp' does not match: tag differ" in first


def test_what_fits_is_not_refused(ranks):
    assert ranks(2, compile_spoilt, -1) == ["", ""]
