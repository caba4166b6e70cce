"""ServerApp of FedPCD: run configuration, evaluation, results on disk and the closing report."""
