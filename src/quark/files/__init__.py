"""Files: the gate that everything written goes through, and readers of files that strangers may have made.

outputs   paths checked before the work; drafts that become outputs together, or not at all
whole     one file replaced by its next content, durably
folder    a folder that appears whole or not at all
ours      whether a file is a result of this package
lock      one process at a time
untrusted JSON and YAML within bounds and a schema
private   folders for intermediate files
kept      the file that a job goes on with, in two generations
identity  what such a job must have in common with the one that began
"""
