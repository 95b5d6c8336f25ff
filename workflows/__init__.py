"""Kubeflow graphs and run profiles: what is submitted, from where you stand."""
