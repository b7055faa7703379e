"""`log.to: [mlflow]`: a run of MLflow, where `MLFLOW_TRACKING_URI` says.

`log.args.mlflow` may have `tracking_uri` and `experiment`.
"""

from __future__ import annotations

from collections.abc import Mapping

from zrun.trackers.tracker import TrackedRun

_MOST_PARAM = 500  # characters of a parameter


class MlflowRun:
    """Goes on with the run that an earlier launch has made."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=run.args.get("tracking_uri"))
        known = run.ids.get("run")
        if known is not None:
            self._id = known
            self._client.update_run(self._id, status="RUNNING")
            return
        name = str(run.args.get("experiment") or run.project)
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        made = self._client.create_run(experiment, run_name=run.name)
        self._id = run.ids["run"] = made.info.run_id
        params = [Param(key, str(value)[:_MOST_PARAM]) for key, value in run.config.items()]
        self._client.log_batch(self._id, params=params[:100])

    def scalars(self, step: int, at: float, values: Mapping[str, float]) -> None:
        told = [self._metric(name, value, round(1e3 * at), step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=told)

    def flush(self) -> None:
        """Every call has reached its place."""

    def end(self, state: str) -> None:
        self._client.set_terminated(
            self._id, status="FINISHED" if state == "finished" else "FAILED"
        )
