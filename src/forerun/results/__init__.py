"""Results of measurements as files: the one schema that every measuring command writes, and its reader."""

from forerun.results.environment import Environment as Environment, Watch as Watch, describe as describe
from forerun.results.read import load as load
from forerun.results.schema import (
    FIGURES as FIGURES,
    FORMAT as FORMAT,
    KINDS as KINDS,
    VERSION as VERSION,
    DrafterFacts as DrafterFacts,
    Figure as Figure,
    PromptFacts as PromptFacts,
    Results as Results,
    RunRow as RunRow,
    TableFacts as TableFacts,
    TargetFacts as TargetFacts,
)
from forerun.results.write import as_object as as_object, save as save, text_of as text_of
