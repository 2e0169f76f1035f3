"""torchsparse itself against the native backend; runs where torchsparse and CUDA are."""

import pytest
import torch

from sparsepipe.models.convert import own_kernel
from sparsepipe.sparse import Conv3d, KernelSpec
from sparsepipe.sparse.backends.torchsparse import TorchSparseBackend
from tests.support.torchsparse_cases import NATIVE, SPECS, gradients, scattered, weights

DEVICE = "cuda"


_reason = None if torch.cuda.is_available() else "needs a CUDA device"
if _reason is None:
    try:
        import torchsparse.backends
    except Exception as error:  # the import loads a binary
        _reason = f"torchsparse cannot be imported: {error}"
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(_reason is not None, reason=str(_reason))]


@pytest.fixture(autouse=True)
def _full_float32():
    torchsparse.backends.allow_tf32 = False  # for its own layers


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_forward_and_backward_equal_the_native_backend(spec):
    x = scattered((17, 18, 19), share=0.1).to(DEVICE)
    ours, our_grads = gradients(NATIVE.conv3d, x, spec)
    theirs, their_grads = gradients(TorchSparseBackend().conv3d, x, spec)
    assert torch.equal(theirs.coords, ours.coords)
    torch.testing.assert_close(theirs.feats, ours.feats, rtol=1e-4, atol=1e-4)
    for their_grad, our_grad in zip(their_grads, our_grads, strict=True):
        scale = our_grad.abs().max().clamp(min=1)
        torch.testing.assert_close(their_grad / scale, our_grad / scale, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("size", "stride"), [(1, 1), (2, 2), (3, 1), (5, 1)])
def test_the_weights_of_a_torchsparse_layer_do_in_ours_what_they_did_there(size, stride):
    import torchsparse.nn

    theirs = torchsparse.nn.Conv3d(4, 8, size, stride=stride, bias=True).to(DEVICE)
    ours = Conv3d(4, 8, size, stride=stride, bias=True).to(DEVICE)
    state = dict(theirs.state_dict())
    state["kernel"] = own_kernel(state["kernel"], "torchsparse", size)
    ours.load_state_dict(state)
    x = scattered((16, 16, 16), channels=4).to(DEVICE)
    out = theirs(torchsparse.SparseTensor(x.feats, x.coords))
    expected = ours(x)
    assert torch.equal(out.coords, expected.coords)
    torch.testing.assert_close(out.feats, expected.feats, rtol=1e-4, atol=1e-4)


def test_half_precision_agrees_to_its_own():
    spec, x = KernelSpec.of(3), scattered((17, 18, 19), channels=16, share=0.1).to(DEVICE)
    kernel = weights(spec, 16)[0].detach().to(DEVICE)
    exact = NATIVE.conv3d(x, kernel, None, spec).feats
    with torch.autocast(DEVICE, dtype=torch.float16):
        half = TorchSparseBackend().conv3d(x, kernel, None, spec).feats
    assert half.dtype == torch.float16
    error = (half.float() - exact).norm() / exact.norm()
    assert error < 5e-3
