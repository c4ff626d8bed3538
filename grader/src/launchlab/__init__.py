"""LaunchLab: a course on CUDA Graphs and TensorRT dynamic shapes, and the grader that measures for itself."""

__version__ = "0.1.0"
