"""diagnose.env: every planted fault is found with a fix that can be pasted, a healthy place has none."""

import json
import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from diagnose import env

ROOT = Path(__file__).resolve().parents[1]
HEALTHY = {
    "torch": ("2.11.0", ["triton==3.6.0; platform_system == 'Linux'", "nvidia-cudnn-cu13==9.19.0", "numpy"]),
    "triton": ("3.6.0", []),
    "nvidia-cudnn-cu13": ("9.19.0", []),
    "nvidia_nccl_cu13": ("2.28.9", []),
    "numpy": ("2.1.0", []),
    "vllm": ("0.30.0", ["torch==2.11.0", "torch==9.9; extra == 'future'", "torch<1; python_version < '3.0'"]),
}


def plant(folder: Path, packages: dict) -> list:
    """Fake dist-info folders, as pip leaves them."""
    for name, (version, requires) in packages.items():
        info = folder / f"{name.split('#')[0]}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name.split('#')[0]}", f"Version: {version}"]
        (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {r}" for r in requires)]) + "\n")
    return env.installed([str(folder)])


def states(result) -> set[str]:
    findings = result if isinstance(result, list) else [result]
    for finding in findings:
        assert finding.fix or finding.state == "ok"
        subprocess.run(["bash", "-n", "-c", finding.fix], check=True)  # at least it is one a shell can read
    return {f.state for f in findings}


def test_healthy_packages(tmp_path):
    dists = plant(tmp_path, HEALTHY)
    assert states(env.check_torch(dists)) == {"ok"}
    assert states(env.check_wheels(dists)) == {"ok"}


FAULTS = {
    "serving pins another torch": ({"vllm": ("0.9", ["torch==2.9.0"])}, "uninstall -y vllm"),
    "any package pins another torch": ({"thing": ("1.0", ["torch (>=2.12)"])}, "uninstall -y thing"),
    "pins another build": ({"thing": ("1.0", ["torch==2.11.0+cu128"])}, "uninstall -y thing"),
    "triton of another torch": ({"triton": ("3.4.0", [])}, "install 'triton==3.6.0'"),
    "cudnn of another torch": ({"nvidia-cudnn-cu13": ("9.10.0", [])}, "install 'nvidia-cudnn-cu13==9.19.0'"),
    "two CUDA majors": ({"nvidia-nccl-cu12": ("2.27", [])}, "uninstall -y nvidia-nccl-cu12"),
    "two tritons": ({"triton#2": ("3.5.0", [])}, "uninstall -y triton"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fighting_wheels(tmp_path, fault):
    planted, fix = FAULTS[fault]
    findings = env.check_wheels(plant(tmp_path, HEALTHY | planted))
    assert "FAIL" in states(findings)
    assert any(fix in f.fix for f in findings), [f.fix for f in findings]


def test_missing_part_of_torch(tmp_path):
    packages = {name: value for name, value in HEALTHY.items() if name != "triton"}
    (finding,) = env.check_wheels(plant(tmp_path, packages))
    assert finding.state == "FAIL" and "triton==3.6.0" in finding.message and "missing" in finding.message


@pytest.mark.parametrize("version, state", [("2.10.1", "FAIL"), ("2.11.0+cu130", "ok"), ("2.13.0", "ok")])
def test_torch_versions(tmp_path, version, state):
    assert states(env.check_torch(plant(tmp_path, {"torch": (version, [])}))) == {state}


def test_no_torch_and_two_torches(tmp_path):
    assert states(env.check_torch(plant(tmp_path / "a", {"numpy": ("2.0", [])}))) == {"FAIL"}
    two = plant(tmp_path / "b", {"torch": ("2.11.0", []), "torch#2": ("2.12.0", [])})
    finding = env.check_torch(two)
    assert finding.state == "FAIL" and finding.fix.count("uninstall -y torch") == 2


def test_nameless_remains_do_not_crash(tmp_path):
    dists = plant(tmp_path, HEALTHY)
    (tmp_path / "half.dist-info").mkdir()
    dists = env.installed([str(tmp_path)])
    assert states(env.check_wheels(dists)) == {"ok"}


def leftovers(folder: Path) -> list[Path]:
    gone = folder / "gone" / "source"
    finder = f"MAPPING: dict[str, str] = {{'pkg': '{gone}'}}\nNAMESPACES: dict = {{}}\n"
    files = {"a.pth": f"{gone}\n", "pkg.egg-link": f"{gone}\n.\n", "__editable___pkg_finder.py": finder}
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "~orch").mkdir()
    return [*(folder / name for name in files), folder / "~orch"]


def test_leftovers_are_found_and_the_fix_works_when_pasted(tmp_path):
    (tmp_path / "good.pth").write_text(f"# comment\nimport os\n{ROOT}\nsub\n")
    (tmp_path / "sub").mkdir()
    assert states(env.check_leftovers([tmp_path])) == {"ok"}
    planted = leftovers(tmp_path)
    findings = env.check_leftovers([tmp_path, tmp_path / "no such folder"])
    assert states(findings) == {"warn"} and len(findings) == len(planted)
    for finding in findings:
        subprocess.run(finding.fix, shell=True, check=True)
    assert states(env.check_leftovers([tmp_path])) == {"ok"}
    assert (tmp_path / "good.pth").exists()


GPU = {"index": "0", "uuid": "GPU-a", "name": "H", "driver_version": "580", "memory.total": "143771"}
GPU |= {"memory.used": "4", "power.draw": "70.5", "power.limit": "700", "persistence_mode": "Enabled"}


def test_gpus():
    assert states(env.check_gpus([GPU], "", [])) == {"ok"}
    busy = GPU | {"memory.used": "90000"}
    (finding,) = env.check_gpus([busy], "", [{"uuid": "GPU-a", "pid": "4242", "mib": "89990"}])
    assert finding.state == "warn" and "4242" in finding.message and "4242" in finding.fix
    assert "FAIL" in states(env.check_gpus([GPU, GPU | {"driver_version": "575"}], "", []))
    assert states(env.check_gpus([], "no nvidia-smi", [])) == {"ok"}
    assert states(env.check_gpus([], "nvidia-smi failed: NVML", [])) == {"FAIL"}
    assert states(env.check_gpus([GPU | {"power.limit": "[N/A]"}], "", [])) == {"ok"}


def test_nvidia_smi_output_is_read():
    Done = namedtuple("Done", "returncode stdout stderr")
    line = "0, GPU-a, NVIDIA H200, 580.1, 143771, 4, 70.5, 700.00, Enabled\n"
    gpus, why = env.query_gpus(lambda *a, **k: Done(0, line, ""))
    assert (gpus[0]["uuid"], gpus[0]["memory.total"], why) == ("GPU-a", "143771", "")
    assert env.query_gpus(lambda *a, **k: Done(9, "NVIDIA-SMI has failed", ""))[1].startswith(
        "nvidia-smi failed"
    )


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize("free_gib, state", [(0.2, "FAIL"), (5, "warn"), (50, "ok")])
def test_disk(tmp_path, monkeypatch, free_gib, state):
    monkeypatch.setattr(env.shutil, "disk_usage", lambda _: Usage(2**40, 0, int(free_gib * 2**30)))
    finding = env.check_disk(tmp_path / "not yet there")
    assert states(finding) == {state}
    subprocess.run(finding.fix, shell=True, check=True)  # what to delete is for the user to say: it shows


def test_shared_memory(tmp_path, monkeypatch):
    assert states(env.check_shared_memory(tmp_path / "none")) == {"warn"}
    monkeypatch.setattr(env.shutil, "disk_usage", lambda _: Usage(2**26, 0, 2**26))
    assert states(env.check_shared_memory(tmp_path)) == {"warn"}


def test_open_files_fix_works_when_pasted():
    assert states(env.check_open_files((65536, 65536))) == {"ok"}
    finding = env.check_open_files((256, 4096))
    assert finding.state == "warn"
    shell = f"ulimit -S -n 256; {finding.fix}; ulimit -S -n"
    assert (
        int(subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout) >= 1024
    )


def test_memory_takes_the_smaller_of_machine_and_cgroup():
    meminfo = "MemTotal:       33554432 kB\nMemFree: 1 kB\nMemAvailable:   16777216 kB\n"
    assert env.memory_gib(meminfo, None, None) == (32, 16)
    assert env.memory_gib(meminfo, "max\n", "5") == (32, 16)
    assert env.memory_gib(meminfo, str(8 * 2**30), str(3 * 2**30)) == (8, 5)


@pytest.mark.parametrize(
    "setting",
    [
        {"OMP_NUM_THREADS": "64"},
        {"OMP_NUM_THREADS": "many"},
        {"TORCHDYNAMO_DISABLE": "1"},
        {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"},
        {"CUDA_LAUNCH_BLOCKING": "1"},
        {"PYTORCH_ALLOC_CONF": "expandable_segment:True"},
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments"},
    ],
    ids=str,
)
def test_settings_and_their_pasted_fix(setting):
    assert states(env.check_settings(setting, 2)) == {"warn"}
    (finding,) = env.check_settings(setting, 2)
    shell = f"{finding.fix}; {sys.executable} -c 'import os, json; print(json.dumps(dict(os.environ)))'"
    done = subprocess.run(
        ["bash", "-c", shell], env={"PATH": os.environ["PATH"]} | setting, capture_output=True
    )
    assert states(env.check_settings(json.loads(done.stdout), 2)) == {"ok"}


def test_good_settings():
    good = "expandable_segments:True,roundup_power2_divisions:[256:1,512:2],max_split_size_mb:128"
    for environ in ({}, {"OMP_NUM_THREADS": "2", "PYTORCH_ALLOC_CONF": good, "CUDA_LAUNCH_BLOCKING": "0"}):
        assert states(env.check_settings(environ, 2)) == {"ok"}


def test_pythonpath_with_a_torch_of_its_own(tmp_path):
    assert states(env.check_settings({"PYTHONPATH": str(tmp_path)}, 2)) == {"ok"}
    (tmp_path / "torch").mkdir()
    assert states(env.check_settings({"PYTHONPATH": str(tmp_path)}, 2)) == {"FAIL"}


@pytest.mark.parametrize("command", [["-m", "diagnose.env"], ["diagnose/env.py"]], ids=str)
def test_this_machine_runs_it_and_exit_code_equals_verdict(tmp_path, command):
    file = tmp_path / "env.json"
    done = subprocess.run(
        [sys.executable, *command, "--json", str(file)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    written = json.loads(file.read_text())
    assert not done.stderr and "CRASH" not in done.stdout
    assert done.returncode == (0 if written["verdict"] == "READY" else 1)
    assert {"torch", "wheels", "disk", "memory", "settings"} <= {c["name"] for c in written["checks"]}
