"""GPUs that a run asks for: an impossible request is refused before Flower starts, which takes its time to fail."""

from __future__ import annotations

from collections.abc import Mapping

from .app_folder import AppFolder, Value
from .errors import UsageError


def check_devices(app: AppFolder, run_config: Mapping[str, Value], gpus_per_client: float) -> None:
    """Check that this machine has the GPUs for a simulation of `app`.

    Parameters
    ----------
    app : AppFolder
        Knows which devices there are.
    run_config : mapping
        ``device`` is used.
    gpus_per_client : float
        Share of a GPU, or whole number of GPUs, that each worker is to have; 0 reserves none.

    Raises
    ------
    UsageError
        Names the option or the key, its value and what to do.
    """
    device = str(run_config.get("device", "cpu"))
    if not (app.path / "client_app" / "training.py").is_file():  # another app: it checks when it runs
        return
    if gpus_per_client:
        _check_share(app, device, gpus_per_client)
    if device not in ("auto", "cpu"):
        training = app.module("client_app.training")
        try:
            training.resolve_device(device)
        except ValueError as error:  # ConfigError
            raise UsageError(str(error)) from error


def _check_share(app: AppFolder, device: str, share: float) -> None:
    option = f"--gpus-per-client {share:g}"
    if share < 0 or (share > 1 and share != int(share)):
        raise UsageError(f"{option}: use a share in (0, 1], e.g. 0.25 for four clients on one GPU, or a whole number")
    if device == "cpu":
        raise UsageError(f"{option} with device='cpu', which uses no GPU: add -c \"device='cuda'\"")
    if device not in ("auto", "cuda", "cuda:0"):
        raise UsageError(f"{option} with device={device!r}: use device='cuda', since each client sees only its own GPU")
    here = app.module("client_app.training").visible_gpus()
    if share > here:
        raise UsageError(
            f"{option}: this machine has {here} GPUs that PyTorch can use, fewer than one client asks for; leave the "
            "option out and use device='cpu', or check the driver and CUDA_VISIBLE_DEVICES"
        )
