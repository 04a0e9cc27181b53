"""The metrics that a label holder publishes, as name -> labels. Histograms are their buckets."""

OF_SERVICE = {
    "vfl_http_answers_total": {"status"},
    "vfl_requests_total": {"outcome"},
    "vfl_rows_total": {"outcome"},
    "vfl_request_seconds_bucket": {"le"},
    "vfl_stage_seconds_bucket": {"le", "stage"},
    "vfl_party_seconds_bucket": {"le", "party"},
    "vfl_party_connected": {"party"},
    "vfl_answers_missing_party_total": {"party", "reason"},
    "vfl_inconsistent_scores_total": {"party"},
    "vfl_refusals_total": {"rule"},
    "vfl_queue_rows": set(),
    "vfl_drift": {"of"},
    "vfl_drifting_columns": {"party", "level"},
    "vfl_model_info": {"run", "strategy", "version"},
    "vfl_results_free_bytes": set(),
    "vfl_certificate_end_timestamp_seconds": set(),
}
"""Metrics of a service."""

OF_RUN = {
    "vfl_run_info": {"run", "strategy"},
    "vfl_run_over": {"run"},
    "vfl_steps_total": set(),
    "vfl_planned_steps": set(),
    "vfl_epoch": set(),
    "vfl_run_seconds": set(),
    "vfl_loss": {"rows"},
    "vfl_metric": {"name", "rows"},
    "vfl_party_in_training": {"party"},
    "vfl_party_wait_seconds": {"party"},
    "vfl_failures_total": {"party"},
    "vfl_exchanges_total": {"party"},
    "vfl_bytes_total": {"party", "direction"},
    "vfl_http_answers_total": {"status"},
    "vfl_epsilon": set(),
    "vfl_checkpoints_total": set(),
    "vfl_checkpoint_timestamp_seconds": set(),
    "vfl_results_free_bytes": set(),
    "vfl_certificate_end_timestamp_seconds": set(),
}
"""Metrics of a training run."""
