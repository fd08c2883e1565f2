"""Classical models trained in the tests, in scikit-learn and in ONNX form.

Libraries are imported on use, because the import takes seconds in each worker that collects.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

OPSETS = {"": 17, "ai.onnx.ml": 3}
COLUMNS = 6


@dataclass(frozen=True)
class Trained:
    """A model, rows that it has not seen, and its ONNX form."""

    model: Any
    rows: Any  # float32 [40, COLUMNS]
    onnx: Any

    def write(self, directory: Path, signature: str | None = None) -> Path:
        """Write a directory to push."""
        import onnx

        directory.mkdir(parents=True)
        onnx.save_model(self.onnx, directory / "model.onnx")
        if signature is not None:
            (directory / "signature.json").write_text(signature)
        return directory


def train(model: Any, *, names: bool = False) -> Trained:
    """Train on generated rows of three classes: with names if `names`, otherwise 0, 1 and 2."""
    import skl2onnx
    from sklearn.datasets import make_classification

    rows, classes = make_classification(
        n_samples=240, n_features=COLUMNS, n_informative=4, n_classes=3, class_sep=0.8, random_state=7
    )
    rows = rows.astype(np.float32)
    model.fit(rows[:200], np.array(["red", "green", "grün"])[classes[:200]] if names else classes[:200])
    options = {} if not hasattr(model, "predict_proba") else {id(model): {"zipmap": False}}
    return Trained(model, rows[200:], skl2onnx.to_onnx(model, rows[:1], options=options, target_opset=OPSETS))


def logistic() -> Trained:
    """Logistic regression behind a scaler; its classes have names."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return train(make_pipeline(StandardScaler(), LogisticRegression(C=0.7)), names=True)


def boosted() -> Trained:
    """Gradient boosting of classes."""
    from sklearn.ensemble import GradientBoostingClassifier

    return train(GradientBoostingClassifier(n_estimators=30, max_depth=3, random_state=1))


def boosted_regression() -> Trained:
    """Gradient boosting of a number."""
    from sklearn.ensemble import GradientBoostingRegressor

    return train(GradientBoostingRegressor(n_estimators=30, max_depth=3, random_state=1))
