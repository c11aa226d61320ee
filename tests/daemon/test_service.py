import pytest

from tenplexfs._pb import control_pb2
from tenplexfs.daemon.service import _target
from tenplexfs.errors import InvalidError


def test_a_mesh_that_names_an_axis_twice_is_refused():
    axes = [control_pb2.Axis(name="tp", size=4), control_pb2.Axis(name="tp", size=1)]
    with pytest.raises(InvalidError, match=r"named twice in \['tp', 'tp'\]"):
        _target(control_pb2.PlanRequest(job="j", mesh=axes))
