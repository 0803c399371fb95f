#!/usr/bin/env bash
# The GitHub release of a tag with all files and their checksums: TAG FOLDER SUMS
set -euo pipefail
tag=$1 folder=$2 sums=$3
(cd "$folder" && sha256sum --check --quiet "$OLDPWD/$sums")
gh release view "$tag" >/dev/null 2>&1 || gh release create "$tag" --verify-tag --generate-notes --draft
gh release upload "$tag" "$folder"/* "$sums" --clobber
gh release edit "$tag" --draft=false
