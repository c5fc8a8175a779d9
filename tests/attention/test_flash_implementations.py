from collections.abc import Iterator

import pytest
import torch
from torch.nn import attention

from trunkline.attention import kernels


class Handle:
    def remove(self) -> None:
        pass


@pytest.fixture
def fake() -> Iterator[str]:
    attention.register_flash_attention_impl("FAKE", register_fn=lambda: Handle())
    yield "FAKE"
    attention.restore_flash_attention_impl(_raise_warn=False)


def test_an_implementation_is_active_for_the_duration_only(fake: str) -> None:
    assert attention.current_flash_attention_impl() is None
    with kernels.activated(fake):
        assert attention.current_flash_attention_impl() == "FAKE"
    assert attention.current_flash_attention_impl() is None
    with pytest.raises(KeyError), kernels.activated(fake):
        raise KeyError
    assert attention.current_flash_attention_impl() is None


@pytest.mark.parametrize(("major", "installed", "expected"), [(9, True, "FA3"), (9, False, None), (8, True, None)])
def test_hopper_gets_flash_attention_3(
    major: int, installed: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr(kernels, "_is_installed", lambda package: installed and package == "flash_attn_interface")
    assert kernels.best_implementation(torch.device("cuda")) == expected


def test_what_the_user_has_activated_stays(fake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "_is_installed", lambda package: True)
    attention.activate_flash_attention_impl(fake)
    assert kernels.best_implementation(torch.device("cuda")) is None


def test_nothing_to_activate_on_a_cpu() -> None:
    assert kernels.best_implementation(torch.device("cpu")) is None
    assert not kernels._is_installed("no_such_package.at_all")
