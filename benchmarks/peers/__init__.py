"""One job per process: each module quantizes or runs one model and measures itself.

They run under any interpreter (`--peer-python` names one that holds a peer), so they import nothing of this project
and only the standard library, numpy and the package that they measure. A job is a JSON file in and a JSON file out:

    python -m benchmarks.peers.quark_job job.json result.json
"""
