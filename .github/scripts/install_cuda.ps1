# The CUDA compiler of one release on Windows: powershell .github/scripts/install_cuda.ps1 12.8
param([Parameter(Mandatory = $true)][string]$Release)
$ErrorActionPreference = "Stop"
$installer = Join-Path $env:TEMP "cuda.exe"
$url = "https://developer.download.nvidia.com/compute/cuda/$Release.0/network_installers/cuda_$Release.0_windows_network.exe"
Invoke-WebRequest -Uri $url -OutFile $installer
$parts = @("nvcc", "cudart", "cuobjdump", "visual_studio_integration")
if ([version]$Release -ge [version]"13.0") { $parts += @("nvvm", "crt") }
$process = Start-Process -Wait -PassThru $installer -ArgumentList (@("-s") + ($parts | ForEach-Object { "${_}_$Release" }))
if ($process.ExitCode -ne 0) { throw "the CUDA $Release installer ended with $($process.ExitCode)" }
$home_ = "C:\Program Files\NVIDIA GPU Computing Toolkit\CUDA\v$Release"
if ($env:GITHUB_ENV) {
    "CUDACXX=$home_\bin\nvcc.exe" >> $env:GITHUB_ENV
    "$home_\bin" >> $env:GITHUB_PATH
}
& "$home_\bin\nvcc.exe" --version
